"""Predicted against measured memory: what `rlhf plan` says and what a process takes.

    .venv/bin/python benchmarks/plan_memory.py [--quick] [--only train,zero] [--write FILE]

Every case is a process of its own, or one per rank: a model of 100 M parameters or more, made here, read from
safetensors. Measured is the peak of the resident size in the phase (``VmHWM``, reset before it) above the resident size
after everything is imported; predicted is the plan's total of that phase without its process. glibc's allocator is left
as it is. Cases: ``forward``, ``train`` and ``generate`` of the embedded runtime, ``zero`` (the trainer deepspeed over
two ranks), ``engine`` (vLLM in process, its cache filled).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "100M": {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "intermediate": 2048, "vocab_size": 32000},
    "100M64": {
        "hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "head_dim": 64, "intermediate": 2048,
        "vocab_size": 32000, "architecture": "llama",
    },
    "153M": {
        "hidden": 1024, "layers": 10, "heads": 16, "kv_heads": 8, "intermediate": 2816, "vocab_size": 16000,
        "tied": False, "architecture": "llama",
    },
    "138M MoE": {
        "hidden": 512, "layers": 8, "heads": 8, "kv_heads": 2, "intermediate": 1024, "vocab_size": 16000,
        "architecture": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip
"""Options of ``rlhf.testing.tiny.tiny_model``."""
CACHE_GIB = 0.25


def cases(quick: bool) -> Iterator[dict[str, Any]]:
    """One object per process."""
    lengths = ((1024, 128), (2048, 512))
    for tokens, length in lengths[: 1 if quick else 2]:
        yield {"model": "100M", "what": "forward", "dtype": "fp32", "tokens": tokens, "length": length}
        for checkpointing in (False, True):
            yield train("100M", tokens, length, checkpointing)
    sampled = {"model": "100M", "what": "generate", "dtype": "fp32", "tokens": 2048, "length": 320, "samples": 64}
    yield sampled
    if quick:
        return
    yield sampled | {"after": 2}
    yield sampled | {"model": "153M"}
    yield {"model": "153M", "what": "forward", "dtype": "fp32", "tokens": 2048, "length": 128}
    for tokens, length in ((1024, 256), (2048, 128)):
        for checkpointing in (False, True):
            yield train("153M", tokens, length, checkpointing)
    for checkpointing in (False, True):
        yield train("138M MoE", 1024, 256, checkpointing)
    for checkpointing in (False, True):
        yield train("100M", 2048, 256, checkpointing, "bf16")
    yield train("100M", 2048, 512, False) | {"shared": True}
    for stage in (2, 3):
        ranks = {"what": "zero", "stage": stage, "ranks": 2}
        yield {"model": "100M", "dtype": "fp32", "tokens": 1024, "length": 128} | ranks
    yield {"model": "100M64", "what": "engine", "dtype": "fp32", "tokens": 0, "length": 320, "samples": 40}


def train(model: str, tokens: int, length: int, checkpointing: bool, dtype: str = "fp32") -> dict[str, Any]:
    """Three steps of two micro-batches, the third one measured: by then the heap has its size."""
    case = {"model": model, "what": "train", "dtype": dtype, "tokens": tokens, "length": length, "steps": 3}
    return case | {"checkpointing": checkpointing}


def make_model(folder: Path, name: str) -> Path:
    """Under ``folder``, once."""
    from rlhf.testing.tiny import tiny_model

    path = folder / name.replace(" ", "-")
    if not (path / "config.json").exists():
        tiny_model(path, std=0.02, **MODELS[name])
    return path


# ---------------------------------------------------------------------------------------- predicted


def predicted(case: dict[str, Any], path: Path) -> int:
    """Bytes above the process, as the plan of such a run has them."""
    from rlhf.config import load
    from rlhf.plan import Machine, make_plan, resolve, sum_of
    from rlhf.plan.busy import forwarding, training
    from rlhf.plan.formulas import LIBRARIES, PROCESS
    from rlhf.plan.phases import engine_resting, resting, sampling
    from rlhf.plugins import Plugins

    flags = {
        "policy.model": str(path),
        "policy.dtype": case["dtype"],
        "policy.micro_tokens": str(case["tokens"]),
        "policy.gradient_checkpointing": str(case.get("checkpointing", False)).lower(),
        "data.train": "unread.jsonl",
        "data.max_tokens": str(case["length"]),
        "reward": "math",
        "sampling.samples_per_prompt": "8",
        "sampling.max_new_tokens": str(case["length"] // 2),
        "data.max_prompt_tokens": str(case["length"] // 2),
        "data.batch_size": str(case.get("samples", 64) // 8),
        "algorithm.use": "grpo",
        "trainer.shared_prefixes": str("shared" in case).lower(),
    }
    if case["what"] == "zero":
        flags |= {"trainer.use": "deepspeed", "trainer.stage": str(case["stage"])}
        flags |= {"launcher.use": "ray", "generator.use": "vllm", "placement.policy.ranks": str(case["ranks"])}
    if case["what"] == "engine":
        flags |= {"launcher.use": "ray", "generator.use": "vllm", "generator.kv_cache_gib": str(CACHE_GIB)}
    layout = resolve(load(None, list(flags.items())), Plugins.discover(), Machine("cpu"))
    policy = layout.role("policy")
    if case.get("after"):
        [group] = make_plan(layout).groups
        return group.moments["generate"].total - PROCESS["cpu"]
    if case["what"] in ("engine", "generate"):
        engines = layout.engines
        assert engines is not None
        held = engine_resting(engines, layout.machine, asleep=False) if case["what"] == "engine" else {}
        before = {} if held else {"weights": resting(policy)[0]["weights"]}  # no step yet: no optimizer state
        return sum(map(sum_of, (held, before, sampling(engines, layout.machine)))) + LIBRARIES["cpu"]
    frozen = replace(policy, trained=False)
    busy = forwarding(frozen, "cpu") if case["what"] == "forward" else training(policy, "cpu")[0]
    rest = resting(frozen if case["what"] == "forward" else policy)[0]
    rest.pop("gradients", None)
    return sum_of(rest) + sum_of(busy) + LIBRARIES["cpu"]


# ----------------------------------------------------------------------------------------- measured


def resident(key: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[key].split()[0]) * 1024


def measure(case: dict[str, Any], path: Path, rank: int = 0, port: int = 0) -> int:
    """Runs in a child. Bytes of the phase's peak above the process after import."""
    import torch

    torch.set_num_threads(1)
    work = {"engine": engine, "zero": zero}.get(case["what"], embedded)
    act, times = work(case, path, rank, port)
    for _ in range(times):
        Path("/proc/self/clear_refs").write_text("5")
        act()
    return resident("VmHWM") - WEIGHED[0]


WEIGHED: list[int] = []


def weigh_process() -> None:
    """The process as it is once everything is imported."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.mixtral import modeling_mixtral  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    gc.collect()
    WEIGHED.append(resident("VmRSS"))


def embedded(case: dict[str, Any], path: Path, rank: int, port: int) -> tuple[Callable[[], Any], int]:
    from rlhf.interfaces import GeneratorSpec, ModelSpec
    from rlhf.types import RoleSpec
    from rlhf_plugin_local.generator import TransformersGenerator
    from rlhf_plugin_local.trainer import TorchTrainer

    weigh_process()
    trained = case["what"] == "train" or "after" in case
    role, checkpointing = RoleSpec("policy", "lm", trained), case.get("checkpointing", False)
    spec = ModelSpec(role, str(path), case["dtype"], gradient_checkpointing=checkpointing, total_updates=9)
    trainer = TorchTrainer(TorchTrainer.Config(lr=1e-6), spec)
    vocabulary = trainer.loaded.vocabulary
    if case["what"] == "generate":
        generator = TransformersGenerator(None, GeneratorSpec(eos_token_ids=(1,), decode=lambda ids: ""))
        generator.load(trainer, 0)
        for _ in range(case.get("after", 0)):
            trainer.update([batch(case, vocabulary, seed) for seed in range(2)], mean_logprob(), {}, {})
        return lambda: list(generator.generate(requests(case, vocabulary))), 1
    micros = [batch(case, vocabulary, seed) for seed in range(2)]
    if trained:
        return lambda: trainer.update(micros, mean_logprob(), {}, {}), case.get("steps", 3)
    return lambda: trainer.forward(micros, ["logprobs"]), 1


def zero(case: dict[str, Any], path: Path, rank: int, port: int) -> tuple[Callable[[], Any], int]:
    import deepspeed  # noqa: F401
    from rlhf.interfaces import ModelSpec
    from rlhf.types import RoleSpec
    from rlhf_plugin_deepspeed.trainer import DeepSpeedTrainer

    weigh_process()
    where = {"rank": rank, "world_size": case["ranks"], "rendezvous": f"tcp://127.0.0.1:{port}"}
    spec = ModelSpec(RoleSpec("policy", "lm", True), str(path), case["dtype"], total_updates=9, **where)
    trainer = DeepSpeedTrainer(DeepSpeedTrainer.Config(lr=1e-6, stage=case["stage"], device="cpu"), spec)
    micros = [batch(case, trainer.loaded.vocabulary, 2 * rank + seed) for seed in range(2)]
    return lambda: trainer.update(micros, mean_logprob(), {}, {}), case.get("steps", 3)


def engine(case: dict[str, Any], path: Path, rank: int, port: int) -> tuple[Callable[[], Any], int]:
    import vllm
    from rlhf.interfaces import GeneratorSpec
    from rlhf_plugin_vllm.generator import VllmGenerator
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

    assert vllm.LLM is not None
    weigh_process()
    spec = GeneratorSpec((1,), lambda ids: "", str(path), case["dtype"], max_tokens=case["length"])
    generator = VllmGenerator(VllmGenerator.Config(kv_cache_gib=CACHE_GIB), spec)
    sync(generator, path)
    return lambda: list(generator.generate(requests(case, MODELS[case["model"]]["vocab_size"]))), 1


def sync(generator: Any, path: Path) -> None:
    """The model's own weights, so that the engine may sample."""
    from rlhf.sync.bucket import buckets
    from safetensors.torch import load_file

    generator.begin_load(0)
    for bucket in buckets(iter(load_file(path / "model.safetensors").items()), 2**28, {}):
        generator.take(bucket)
    generator.end_load()


def batch(case: dict[str, Any], vocabulary: int, seed: int) -> Any:
    """A micro-batch of sequences of one length, loss on all that something predicts. They are distinct; or ``shared``,
    samples of one prompt, which is half of each, with loss on the answers: as many as compute these tokens."""
    import torch
    from rlhf.ops.batch import Batch
    from rlhf.ops.reduce import weigh

    length, shared = case["length"], case.get("shared", False)
    half = length // 2
    count = (case["tokens"] - half) // half if shared else case["tokens"] // length
    ids_N = torch.randint(3, vocabulary, (count * length,), generator=torch.Generator().manual_seed(seed))
    mask_N = torch.ones(count * length, dtype=torch.bool)
    mask_N[::length] = False
    if shared:
        ids_N.view(count, length)[:, :half] = ids_N[:half]
        mask_N.view(count, length)[:, :half] = False
    lens_B, unit_B = torch.full((count,), length), torch.arange(count)
    made = Batch(ids_N, lens_B, unit_B, torch.zeros(count, dtype=torch.int64), {"loss_mask": mask_N})
    return weigh(made, mean_logprob().reduce())


def mean_logprob() -> Any:
    """The plainest loss of log-probs."""
    from rlhf.interfaces import Loss
    from rlhf.types import LossOutput, Reduce

    class MeanLogprob(Loss):
        name = "mean_logprob"

        def outputs(self) -> tuple[str, ...]:
            return ("logprobs",)

        def columns(self) -> tuple[str, ...]:
            return ()

        def reduce(self) -> dict[str, Reduce]:
            return {"mean": Reduce("token_mean")}

        def __call__(self, x: Any) -> LossOutput:
            return LossOutput(terms={"mean": -x["logprobs"]})

    return MeanLogprob()


def requests(case: dict[str, Any], vocabulary: int) -> list[Any]:
    """8 samples of each prompt, prompt and answer half of the length each."""
    import torch
    from rlhf.types import GenerationRequest, Sampling

    half = case["length"] // 2
    prompts = case["samples"] // 8
    ids = torch.randint(3, vocabulary, (prompts, half), generator=torch.Generator().manual_seed(0)).tolist()
    sampling = Sampling(max_new_tokens=half, ignore_eos=True)
    return [GenerationRequest(tuple(ids[i // 8]), i, sampling) for i in range(case["samples"])]


# -------------------------------------------------------------------------------------------- table


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The case with ``predicted`` and ``measured`` bytes (of the rank with most) and their ratio."""
    path = make_model(folder, case["model"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, __file__, "--case", json.dumps(case), "--model", str(path), "--port", port]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [*command, "--rank", str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(case.get("ranks", 1))
    ]
    took = []
    for child in children:
        out, errors = child.communicate()
        if child.returncode:
            raise SystemExit(f"{case} failed:\n{errors}")
        took.append(json.loads(out.splitlines()[-1])["measured"])
    said = predicted(case, path)
    return case | {"measured": max(took), "predicted": said, "ratio": round(said / max(took), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--write", type=Path, help="the rows as JSON")
    parser.add_argument("--only", help="kinds of cases, joined by commas")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps({"measured": measure(json.loads(args.case), args.model, args.rank, args.port)}))
        return
    rows = []
    print("| model | phase | arithmetic | checkpointed | tokens | length | predicted MiB | measured MiB | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(args.quick):
            if args.only and case["what"] not in args.only.split(","):
                continue
            row = run(case, Path(folder))
            rows.append(row)
            what = f"{row['what']} {row['stage']}, {row['ranks']} ranks" if "stage" in row else row["what"]
            what += " after training" * ("after" in row) + " of samples of a prompt" * ("shared" in row)
            cells = [row["model"], what, row["dtype"], "yes" if row.get("checkpointing") else "no"]
            cells += [row["tokens"], row["length"], row["predicted"] >> 20, row["measured"] >> 20, row["ratio"]]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if args.write:
        args.write.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
