"""What an update of adapters changes in a bf16 engine of vLLM: merged into the weights, and alone beside the base. And
the bytes and the time of both kinds of sync.

    .venv/bin/python benchmarks/adapters.py MODEL [--result FILE]

The base is rounded to bf16 first, so that it is the same in the trainer (fp32) and in the engines. The effect of an
update is, for each token of held-out text, its change of the log-prob (rms). The share that survives in an engine is
the slope of its changes over the trainer's, the rest its own rounding (rms). Engines in fp32 get the weights or factors
rounded to bf16: they show what is lost in storage alone. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from ours_prefixes import Nll
from rlhf.interfaces import ModelSpec
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.interfaces.model import PARTS
from rlhf.ops.batch import Batch
from rlhf.ops.heads import resolve_head
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec
from rlhf.weights.bucket import buckets
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.weight_sync import WeightSync
from settings import THREADS, median
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = Path(__file__).parents[1] / "docs" / "concepts" / "architecture.md"
TOKENS, TRAINED, MEASURED = 64, 2, 10
"""Tokens of a sequence; sequences of an update; sequences that are measured."""
WAYS = ("merged", "alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="folder that transformers loads")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--repeats", type=int, default=5, help="of each sync that is timed")
    parser.add_argument("--result", type=Path, help="JSON file to write as well")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(arguments.model)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        ids = tokenizer(TEXT.read_text())["input_ids"]
        result = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "effect": effects(folder, ids, arguments),
            "sync": syncs(folder, arguments.repeats),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.result is not None:
        arguments.result.write_text(text + "\n")


def policy(folder: str, rank: int, lr: float) -> Role:
    spec = ModelSpec(RoleSpec("policy", trained=True), folder, "fp32")
    config = TorchTrainerConfig(lr=lr, device="cpu", lora={"rank": rank})
    return Role(spec, LocalLauncher(None).launch_trainer(TorchTrainer, config, spec), 2048)


def engine(folder: str, rank: int, way: str, dtype: str = "bf16") -> VllmGenerator:
    spec = ModelSpec(RoleSpec("policy", trained=True), folder)
    adapters = TorchTrainer.adapters(TorchTrainerConfig(lora={"rank": rank}), spec) if way == "alone" else None
    generated = GeneratorSpec((1,), str, folder, dtype, max_tokens=256, adapters=adapters)
    return VllmGenerator(VllmGenerator.Config(kv_cache_gib=0.25, max_sequences=64), generated)


# ------------------------------------------------------------------------------------------ effect


def effects(folder: str, ids: list[int], arguments: argparse.Namespace) -> list[dict[str, object]]:
    rows = [ids[i * TOKENS : (i + 1) * TOKENS] for i in range(TRAINED + MEASURED)]
    engines = {f"{way}, {dtype}": engine(folder, 8, way, dtype) for dtype in ("fp32", "bf16") for way in WAYS}
    try:
        base: dict[str, Tensor] = {}
        return [line for lr in arguments.rates for line in effect(folder, rows, lr, arguments.steps, engines, base)]
    finally:
        for generator in engines.values():
            generator.close()


def effect(
    folder: str,
    rows: list[list[int]],
    lr: float,
    steps: list[int],
    engines: Mapping[str, VllmGenerator],
    base: dict[str, Tensor],
) -> Iterator[dict[str, object]]:
    """One line for each of ``steps``. ``base``: readings of the base, which the first call fills."""
    role = policy(folder, 8, lr)
    update, measured = weigh(batch(rows[:TRAINED]), Nll().reduce()), rows[TRAINED:]
    readers = readings(role, measured, engines)
    for name, reading in readers.items() if not base else ():
        base[name] = reading()
    for step in range(1, max(steps) + 1):
        role.group.worker.update([update], Nll(), {}, {})
        if step in steps:
            changes = {name: reading() - base[name] for name, reading in readers.items()}
            truth_N = changes.pop("trainer")
            line: dict[str, object] = {"lr": lr, "steps": step, "rms": rms(truth_N)}
            for name, change_N in changes.items():
                share = float((change_N @ truth_N) / (truth_N @ truth_N))
                rest = rms(change_N - share * truth_N)
                error = rest / (rms(truth_N) * len(truth_N) ** 0.5)
                line[name] = {"share": round(share, 4), "error": round(error, 4), "rest": rest}
            print(json.dumps(line), file=sys.stderr)
            yield line


def readings(
    role: Role, rows: list[list[int]], engines: Mapping[str, VllmGenerator]
) -> dict[str, Callable[[], Tensor]]:
    """{name: function that returns the log-probs [N] of the rows' tokens}: of the trainer, and of each engine after a
    sync."""

    def of_trainer() -> Tensor:
        flat = role.forward(batch(rows), [resolve_head("logprobs", None)])["logprobs"]
        return torch.cat([part[1:] for part in flat.split(TOKENS)]).double()

    def of_engine(way: str) -> Tensor:
        engines[way].begin_load(0)
        view = PARTS if way.startswith("alone") else "live"
        rounded = ((name, tensor.bfloat16().float()) for name, tensor in role.group.worker.weights(view))
        for bucket in buckets(rounded, 2**28, {}):
            engines[way].take(bucket)
        engines[way].end_load()
        return torch.tensor(engines[way].logprobs(rows)[0]).flatten().double()

    return {"trainer": of_trainer, **{way: lambda way=way: of_engine(way) for way in engines}}


def batch(rows: list[list[int]]) -> Batch:
    return pack([UnitData([SequenceData(ids, {"loss_mask": [i > 0 for i in range(len(ids))]})]) for ids in rows])


def rms(values: Tensor) -> float:
    return float(f"{float(values.square().mean().sqrt()):.3g}")


# -------------------------------------------------------------------------------------------- sync


def syncs(folder: str, repeats: int) -> dict[str, object]:
    """Of rank 16, weights and adapters stored in fp32: seconds, the proof included, and MiB."""
    role, engines = policy(folder, 16, 1e-5), {way: engine(folder, 16, way) for way in WAYS}
    pushes = {
        way: WeightSync(role, generator, SyncSection(tolerance=0.5), 0, print, adapters=way == "alone")
        for way, generator in engines.items()
    }
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    mebibytes = {}
    try:
        for turn in range(repeats + 1):  # the first one brings the base too
            for way, push in pushes.items():
                start = time.perf_counter()
                metrics = push.push(turn)
                if turn:
                    seconds[way].append(time.perf_counter() - start)
                    mebibytes[way] = metrics["sync/MiB"]
    finally:
        for generator in engines.values():
            generator.close()
    middle = {way: round(median(values), 4) for way, values in seconds.items()}
    return {
        "MiB": mebibytes,
        "seconds": middle,
        "fewer bytes": round(mebibytes["merged"] / mebibytes["alone"], 1),
        "faster": round(middle["merged"] / middle["alone"], 2),
    }


if __name__ == "__main__":
    main()
