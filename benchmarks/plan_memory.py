"""Predicted against measured memory of the embedded runtime: what `rlhf plan` says and what a process takes.

    .venv/bin/python benchmarks/plan_memory.py [--quick] [--write FILE]

Every case is a process of its own: one model of 100 M parameters or more, made here, read from safetensors. Measured is
the peak of the resident size in the phase (``VmHWM``, reset before it) above the resident size after everything is
imported; predicted is the plan's total of that phase without its process. glibc's allocator is left as it is.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "100M": {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "intermediate": 2048, "vocab_size": 32000},
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


def cases(quick: bool) -> Iterator[dict[str, Any]]:
    """One object per process."""
    lengths = ((1024, 128), (2048, 512))
    for tokens, length in lengths[: 1 if quick else 2]:
        yield {"model": "100M", "what": "forward", "dtype": "fp32", "tokens": tokens, "length": length}
        for checkpointing in (False, True):
            case = {"model": "100M", "what": "train", "dtype": "fp32", "tokens": tokens, "length": length}
            yield case | {"checkpointing": checkpointing}
    yield {"model": "100M", "what": "generate", "dtype": "fp32", "tokens": 2048, "length": 320, "samples": 64}
    if quick:
        return
    for name in ("153M", "138M MoE"):
        for checkpointing in (False, True):
            case = {"model": name, "what": "train", "dtype": "fp32", "tokens": 1024, "length": 256}
            yield case | {"checkpointing": checkpointing}
    for checkpointing in (False, True):
        case = {"model": "100M", "what": "train", "dtype": "bf16", "tokens": 2048, "length": 256}
        yield case | {"checkpointing": checkpointing}


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
    from rlhf.plan.formulas import LIBRARIES, PROCESS
    from rlhf.plan.phases import forwarding, resting
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
    }
    layout = resolve(load(None, list(flags.items())), Plugins.discover(), Machine("cpu"))
    policy = layout.role("policy")
    if case["what"] == "forward":  # a frozen role of the policy's shape
        frozen = replace(policy, trained=False)
        parts = {**resting(frozen)[0], **forwarding(frozen, "cpu")}
        return sum_of(parts) + LIBRARIES["cpu"]
    [group] = make_plan(layout).groups
    total = group.moments[case["what"]].total - PROCESS["cpu"]
    if case["what"] == "generate":  # measured before the first step: no optimizer state yet
        total -= resting(policy)[0]["optimizer"]
    return total


# ----------------------------------------------------------------------------------------- measured


def resident(key: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[key].split()[0]) * 1024


def measure(case: dict[str, Any], path: Path) -> int:
    """Runs in a child. Bytes of the phase's peak above the process after import."""
    import torch

    torch.set_num_threads(1)
    from rlhf.interfaces import GeneratorSpec, ModelSpec
    from rlhf.types import RoleSpec
    from rlhf_plugin_local.generator import TransformersGenerator
    from rlhf_plugin_local.trainer import TorchTrainer
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401 - to be in the process before it is weighed
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.mixtral import modeling_mixtral  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    gc.collect()
    before = resident("VmRSS")
    trained = case["what"] == "train"
    role = RoleSpec("policy", "lm", trained)
    spec = ModelSpec(
        role, str(path), case["dtype"], gradient_checkpointing=case.get("checkpointing", False), total_updates=9
    )
    trainer = TorchTrainer(TorchTrainer.Config(lr=1e-6), spec)
    micros = [batch(case, trainer.loaded.vocabulary, seed) for seed in range(2)]
    if case["what"] == "generate":
        generator = TransformersGenerator(None, GeneratorSpec(eos_token_ids=(1,), decode=lambda ids: ""))
        generator.load(trainer, 0)
    steps = 3 if trained else 1  # the third step is like all that follow
    for _ in range(steps):
        Path("/proc/self/clear_refs").write_text("5")
        if trained:
            trainer.update(micros, mean_logprob(), {}, {})
        elif case["what"] == "forward":
            trainer.forward(micros, ["logprobs"])
        else:
            for _ in generator.generate(requests(case, trainer.loaded.vocabulary)):
                pass
    return resident("VmHWM") - before


def batch(case: dict[str, Any], vocabulary: int, seed: int) -> Any:
    """A micro-batch of distinct sequences of one length, loss on all that something predicts."""
    import torch
    from rlhf.ops.batch import Batch
    from rlhf.ops.reduce import weigh

    count, length = case["tokens"] // case["length"], case["length"]
    ids_N = torch.randint(3, vocabulary, (count * length,), generator=torch.Generator().manual_seed(seed))
    mask_N = torch.ones(count * length, dtype=torch.bool)
    mask_N[::length] = False
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
    """The case with ``predicted`` and ``measured`` bytes and their ratio."""
    path = make_model(folder, case["model"])
    command = [sys.executable, __file__, "--case", json.dumps(case), "--model", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{case} failed:\n{done.stderr}")
    took, said = json.loads(done.stdout.splitlines()[-1])["measured"], predicted(case, path)
    return case | {"measured": took, "predicted": said, "ratio": round(said / took, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--write", type=Path, help="the rows as JSON")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps({"measured": measure(json.loads(args.case), args.model)}))
        return
    rows = []
    print("| model | phase | arithmetic | checkpointed | tokens | length | predicted MiB | measured MiB | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(args.quick):
            row = run(case, Path(folder))
            rows.append(row)
            cells = [row["model"], row["what"], row["dtype"], "yes" if row.get("checkpointing") else "no"]
            cells += [row["tokens"], row["length"], row["predicted"] >> 20, row["measured"] >> 20, row["ratio"]]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if args.write:
        args.write.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
