"""What is planned and measured: models of 100 M parameters or more, and what is done with them.

A case is a plain object, handed to a child process as JSON: ``model`` (of :data:`MODELS`), ``what``, ``dtype``,
``tokens`` of a micro-batch and ``length`` of its sequences, and what that kind of case has beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

Case = dict[str, Any]

MODELS: Case = {
    "100M": {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "intermediate": 2048, "vocab_size": 32000},
    "100M64": {
        "hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "head_dim": 64, "intermediate": 2048,
        "vocab_size": 32000, "architecture": "llama",
    },
    "153M": {
        "hidden": 1024, "layers": 10, "heads": 16, "kv_heads": 8, "intermediate": 2816, "vocab_size": 16000,
        "tied": False, "architecture": "llama",
    },
    "150M wide": {
        "hidden": 1536, "layers": 4, "heads": 12, "kv_heads": 3, "head_dim": 128, "intermediate": 4096,
        "vocab_size": 32000, "architecture": "llama",
    },
    "131M vocabulary": {
        "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 2, "intermediate": 1536, "vocab_size": 104000,
        "tied": False,
    },
    "138M MoE": {
        "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 2, "intermediate": 1024, "vocab_size": 16000,
        "architecture": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip
"""Options of ``rlhf_testing.tiny.tiny_model``; Qwen3 where no architecture is said, grouped queries in all."""
CACHE_GIB = 0.25
LORA = {"rank": 16}


def make_model(folder: Path, name: str) -> Path:
    """Under ``folder``, once."""
    from rlhf_testing.tiny import tiny_model

    path = folder / name.replace(" ", "-")
    if not (path / "config.json").exists():
        tiny_model(path, std=0.02, **MODELS[name])
    return path


def forward(model: str, tokens: int, length: int, dtype: str = "fp32") -> Case:
    """Log-probs of a frozen role."""
    return {"model": model, "what": "forward", "dtype": dtype, "tokens": tokens, "length": length}


def train(model: str, tokens: int, length: int, checkpointing: bool, dtype: str = "fp32") -> Case:
    """Two steps of two micro-batches, the second one measured: the first makes the optimizer's states."""
    case = {"model": model, "what": "train", "dtype": dtype, "tokens": tokens, "length": length, "steps": 2}
    return case | {"checkpointing": checkpointing}


def generate(model: str, length: int, samples: int, dtype: str = "fp32") -> Case:
    """Eight samples of each prompt; prompt and answer are half of the length each. With ``after`` so many rounds of a
    step of training on ``tokens`` and sampling: the most that sampling takes is measured."""
    return {"model": model, "what": "generate", "dtype": dtype, "tokens": 2048, "length": length, "samples": samples}


def zero(stage: int, model: str, tokens: int, length: int, dtype: str = "fp32") -> Case:
    """The trainer ``deepspeed`` over two ranks."""
    return train(model, tokens, length, False, dtype) | {"stage": stage, "ranks": 2}


def whole(name: str, model: str, tokens: int, length: int, **flags: str) -> Case:
    """A run of ``rlhf train`` in one process; ``flags`` with ``__`` for dots."""
    case = {"model": model, "what": "run", "dtype": "fp32", "tokens": tokens, "length": length, "name": name}
    return case | {"flags": {key.replace("__", "."): value for key, value in flags.items()}}


def cases() -> Iterator[Case]:
    """One object per process, or per pair of ranks."""
    yield from embedded()
    yield from kinds()
    yield from divided()
    yield from sampled()
    yield from runs()


def embedded() -> Iterator[Case]:
    """Shapes, precisions, with and without checkpointing."""
    for tokens, length in ((1024, 128), (2048, 512)):
        yield forward("100M", tokens, length)
        for checkpointing in (False, True):
            yield train("100M", tokens, length, checkpointing)
    for model in ("150M wide", "131M vocabulary", "153M"):
        yield forward(model, 512, 128)
        for dtype in ("fp32", "bf16"):
            for checkpointing in (False, True):
                yield train(model, 512 if dtype == "fp32" else 256, 128, checkpointing, dtype)
    for checkpointing in (False, True):
        yield train("138M MoE", 512, 128, checkpointing)
    yield forward("138M MoE", 512, 128)
    yield train("138M MoE", 512, 128, False) | {"what": "load"}
    yield train("100M", 1024, 512, False) | {"shared": True}


def kinds() -> Iterator[Case]:
    """Roles other than a policy, and what else a trainer may hold."""
    yield train("100M", 512, 128, False) | {"role": "critic"}
    yield train("153M", 512, 128, True, "bf16") | {"role": "critic"}
    yield train("100M", 512, 128, False) | {"loss": "pairwise"}
    yield forward("150M wide", 512, 128) | {"role": "reward_model"}
    yield forward("131M vocabulary", 512, 128) | {"role": "teacher"}
    yield train("100M", 512, 128, False) | {"lora": LORA}
    yield train("100M", 512, 128, False) | {"lora": LORA, "kernels": "none"}
    yield train("150M wide", 512, 128, True) | {"lora": LORA}
    yield train("100M", 512, 128, False) | {"ema": 0.99}


def divided() -> Iterator[Case]:
    """ZeRO over two ranks that meet over gloo."""
    for stage in (2, 3):
        yield zero(stage, "100M", 512, 128)
        yield zero(stage, "150M wide", 512, 128, "bf16")
        yield zero(stage, "100M", 512, 128) | {"checkpointing": True}
    yield zero(3, "131M vocabulary", 512, 128)
    yield zero(3, "100M", 512, 128) | {"what": "forward"}
    yield zero(2, "100M", 512, 128) | {"ema": 0.99}
    yield zero(2, "100M", 512, 128) | {"role": "critic"}
    yield zero(2, "100M", 512, 128) | {"ranks": 1, "optimizer": "muon"}
    for stage in (0, 1, 2, 3):
        yield zero(stage, "100M", 512, 128) | {"what": "load"}
    for stage in (2, 3):
        yield zero(stage, "100M", 512, 128) | {"what": "load", "offload": "cpu"}


def sampled() -> Iterator[Case]:
    """Samples from the trainer's module, and from vLLM in process, its cache filled."""
    yield generate("100M", 320, 64)
    for tokens in (320, 640):
        yield generate("100M", 320, 64) | {"after": 6, "tokens": tokens}
    yield generate("150M wide", 320, 64, "bf16")
    yield generate("131M vocabulary", 320, 64)
    for model, dtype in (("100M64", "fp32"), ("153M", "fp32"), ("100M64", "bf16")):
        yield {"model": model, "what": "engine", "dtype": dtype, "tokens": 0, "length": 320, "samples": 40}


def runs() -> Iterator[Case]:
    """Whole runs of two steps, every phase up to each point; of six where samples are drawn, as what training left of
    the heap is found again more or less. Folders of models stand in braces."""
    yield whole("dpo, reference precomputed", "100M", 192, 64, algorithm__use="dpo", reference__precompute="true")
    yield whole(
        "ppo with a reward model", "100M", 128, 32, algorithm__use="ppo", reward="model:{scores}", run__steps="6"
    )
    teacher = {"roles__teacher__model": "{153M}", "roles__teacher__dtype": "fp32"}
    yield whole("distillation", "100M", 128, 64, algorithm__use="distill", **teacher)
    yield whole(
        "grpo with a reference", "100M", 128, 32, algorithm__use="grpo", algorithm__kl__coef="0.01", run__steps="6"
    )
    yield whole("reward model", "153M", 192, 64, algorithm__use="reward_model")
