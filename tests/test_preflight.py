"""What a started run would refuse is refused by ``--dry-run`` and, where it does not depend on the machine, by ``rlhf
plan``, before anything is started."""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from rlhf.modeling.checks import LEARNING
from rlhf.modeling.config import TrainingConfig
from rlhf_cli.main import main

from tests.runs import Workshop

ON_RAY, VLLM, ZERO = ({"launcher": {"use": "ray"}}, {"generator": {"use": "vllm"}}, {"trainer": {"use": "deepspeed"}})

EVERYWHERE: dict[str, tuple[str, dict[str, Any], str]] = {
    "engines elsewhere": (
        "grpo", ON_RAY, "generator 'transformers' samples from a trainer's module in its own process",
    ),
    "one rank": (
        "sft", ON_RAY | {"placement": {"policy": {"ranks": 2}}}, "trainer 'torch' runs on one rank, role 'policy' asks",
    ),
    "one process": ("sft", {"placement": {"policy": {"ranks": 2}}}, "launcher 'local' has one process and one device"),
    "transport": ("grpo", VLLM | {"sync": {"transport": "store"}}, "with launcher 'local' weights are handed over"),
    "second copies": (
        "sft", {"trainer": {"use": "deepspeed", "stage": 3, "hpz_partition_size": 2}},
        "hpz_partition_size = 2 does not divide the 1 ranks of role 'policy'",
    ),
    "parts": (
        "sft", {"trainer": {"use": "deepspeed", "tensor_parallel": 2}}, "tensor_parallel = 2 does not divide the 1 ",
    ),
    "heads": (
        "sft", ON_RAY | {"trainer": {"use": "deepspeed", "tensor_parallel": 5}, "placement": {"policy": {"ranks": 5}}},
        "tensor_parallel = 5 does not divide Qwen3ForCausalLM's num_attention_heads",
    ),
    "temperature": ("grpo", VLLM | {"sampling": {"temperature": 0.001}}, "sampling.temperature is 0.001; it must be 0"),
    "cache": ("grpo", {"generator": {"max_cache_tokens": 6}}, "do not fit into generator.max_cache_tokens = 6"),
    "reference": (
        "dpo", {"reference": {"trainer": {"lr": 1e-4, "lora": {"rank": 2}}}},
        "reference.trainer.lora ... reference.trainer.lr ... : reference is not trained, so nothing reads it. Remove",
    ),
    "optimizer of a reference": (
        "dpo", ZERO | {"reference": {"trainer": {"optimizer": "muon"}}}, "reference.trainer.optimizer",
    ),
    "reward model": (
        "grpo",
        {"reward": [{"use": "model", "model": "MODEL"}], "roles": {"reward_model": {"trainer": {"ema_decay": 0.9}}}},
        "roles.reward_model.trainer.ema_decay ... : reward_model is not trained, so",
    ),
}  # fmt: skip
"""{case: (algorithm, changes, what is said, in parts)}."""
HERE: dict[str, tuple[str, dict[str, Any], str]] = {
    "flash": ("sft", {"trainer": {"attention": "flash"}}, "trainer.attention = 'flash' cannot be had: "),
    "liger": ("sft", {"trainer": {"kernels": "liger"}}, "trainer.kernels = 'liger' cannot be had: Liger's kernels "),
    "liger on ranks": (
        "sft", ON_RAY | {"trainer": {"use": "deepspeed", "kernels": "liger"}},
        "trainer.kernels = 'liger' cannot be had",
    ),
    "cuda": ("sft", {"trainer": {"device": "cuda"}}, "device = 'cuda' but torch"),
    "memory share": ("grpo", VLLM | {"generator": {"use": "vllm", "memory_share": 0.5}}, "cannot do memory_share = "),
    "prefill": (
        "grpo", {"generator": {"use": "vllm", "max_batched_tokens": 8, "max_sequences": 4}},
        "max_batched_tokens = 8 does not hold a sequence of 65 tokens",
    ),
}  # fmt: skip
"""What a CPU cannot do; ``rlhf plan`` may be for another machine."""


def said(*words: str) -> tuple[int, str]:
    """Exit code and everything that a command printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, " ".join((out.getvalue() + err.getvalue()).split())


def run_file(tiny: Workshop, name: str, algorithm: str, changes: dict[str, Any]) -> str:
    config = tiny.config(algorithm, f"preflight {name}", **changes)
    for reward in config.get("reward", ()):
        if "model" in reward:
            reward["model"] = str(tiny.model)
    return tiny.arguments(config)[1]


def needed(changes: dict[str, Any]) -> None:
    for kind, name in (("launcher", "ray"), ("trainer", "deepspeed"), ("generator", "vllm")):
        if changes.get(kind, {}).get("use") == name and find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("name", EVERYWHERE)
def test_refused_by_a_dry_run_and_by_a_plan(tiny, name):
    algorithm, changes, why = EVERYWHERE[name]
    needed(changes)
    path = run_file(tiny, name, algorithm, changes)
    for words in (("train", path, "--dry-run"), ("plan", path, "--device", "cpu", "--device-memory", "64GiB")):
        code, text = said(*words)
        assert code == 2
        assert all(part in text for part in why.split(" ... "))
    assert not (tiny.folder / f"preflight {name}").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize("name", HERE)
def test_refused_by_a_dry_run_for_this_machine(tiny, name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    algorithm, changes, why = HERE[name]
    needed(changes)
    path = run_file(tiny, name, algorithm, changes)
    code, text = said("train", path, "--dry-run")
    assert code == 2
    assert why in text


def test_a_frozen_role_takes_over_what_others_learn_with(tiny):
    changes = {"trainer": {"lr": 1e-3, "ema_decay": 0.9}, "reference": {"trainer": {"logits_chunk": 4096}}}
    code, text = said("train", run_file(tiny, "inherits", "dpo", changes), "--dry-run")
    assert code == 0, text


def test_a_policy_that_only_answers_keeps_the_section_of_its_training(tiny):
    path = run_file(tiny, "answers", "grpo", {"policy": {"trainer": {"lr": 1e-3}}})
    code, text = said("eval", path, "--eval.max_rows", "1", "--eval.max_new_tokens", "2")
    assert code == 0, text


def test_every_option_of_training_is_known_to_be_one():
    """A new one is of training, and refused for a frozen role, or stands here."""
    computing = {"shared_prefixes", "attention", "kernels", "logits_chunk", "head_fp32"}
    assert LEARNING | computing == TrainingConfig.model_fields.keys()
    assert not LEARNING & computing
