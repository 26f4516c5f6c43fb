"""Time of a weight sync, trainer to one vLLM engine in this process, against the necessary minimum: one copy of the
bytes and vLLM's own repacking.

    .venv/bin/python benchmarks/weight_sync.py [--layers 15] [--repeats 9] [--result FILE]
    .venv/bin/python benchmarks/weight_sync.py --differences MODEL [--rates 1e-6 1e-5] [--steps 5] [--result FILE]

All are timed in turn, in one process, on the same tensors; medians. Prints one JSON object. On a machine that other
processes use too, only processor seconds with BENCH_THREADS=1 are meaningful.

``--differences`` counts the elements of MODEL whose bf16 value a step of AdamW changes, on text of this repository, and
the bytes of the files that generator.sync = "differences" writes. Nothing is timed, and no engine is started.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from adapters import TEXT, TOKENS, batch
from ours_prefixes import Nll
from rlhf.interfaces import ModelSpec
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec
from rlhf_engines.differences import SentWeights
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_testing.tiny import tiny_model
from settings import THREADS, median
from transformers import AutoTokenizer

TARGET = 2.0
SEQUENCES = 8
"""Of a step whose differences are measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=15, help="of hidden size 768; 15 give 101 M parameters")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bucket-mb", type=int, default=SyncSection().bucket_mb)
    parser.add_argument("--differences", type=Path, metavar="MODEL", help="folder that transformers loads")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 2e-5])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--result", type=Path, help="JSON file to write as well")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.differences is None:
            result = measure(Path(folder), arguments)
        else:
            lines = [line for lr in arguments.rates for line in differences(Path(folder), lr, arguments)]
            result = {"model": arguments.differences.name, "sequences": SEQUENCES, "tokens": TOKENS, "steps": lines}
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.result is not None:
        arguments.result.write_text(text + "\n")


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    sizes = {"hidden": 768, "layers": arguments.layers, "heads": 12, "kv_heads": 4, "intermediate": 2048, "std": 0.02}
    path = str(tiny_model(folder, **sizes, vocab_size=8192))
    spec = ModelSpec(RoleSpec("policy", trained=True), path, "fp32")
    group = LocalLauncher(None).launch_trainer(TorchTrainer, TorchTrainerConfig(device="cpu"), spec)
    generator = VllmGenerator(
        VllmGenerator.Config(kv_cache_gib=0.25), GeneratorSpec((1,), str, path, "fp32", max_tokens=256)
    )
    try:
        return compare(Role(spec, group, 1000), generator, arguments)
    finally:
        generator.close()


def compare(role: Role, generator: VllmGenerator, arguments: argparse.Namespace) -> dict[str, object]:
    weights = [(name, tensor) for name, tensor in role.group.worker.weights()]
    target = [torch.empty_like(tensor) for _, tensor in weights]
    worker = generator.engine._llm.engine_core.engine_core.model_executor.driver_worker.worker

    def copy() -> None:
        for destination, (_, source) in zip(target, weights, strict=True):
            destination.copy_(source)

    def repack() -> None:
        """vLLM's own path for weights in memory, plus the head, which that path does not load."""
        from rlhf_plugin_vllm.worker.reload import repack_tied, tied_heads
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        model = worker.get_model()
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            heads = list(tied_heads(model))
            reload_weights(worker.vllm_config, model, iter(weights), None, True)
            repack_tied(heads)

    def sync(canaries: int) -> Callable[[], None]:
        section = SyncSection(canaries=canaries, bucket_mb=arguments.bucket_mb)
        pushed = WeightSync(role, generator, section, 0, print)
        return lambda: pushed.push(1) and None

    arms = {"copy": copy, "repack": repack, "sync": sync(0), "sync with canary": sync(SyncSection().canaries)}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    processor: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(arguments.repeats + 2):  # the first two touch memory and load kernels
        for name, arm in arms.items():
            start, busy = time.perf_counter(), time.process_time()
            arm()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - busy)
    return {
        "parameters": sum(t.numel() for _, t in weights),
        "MiB": sum(t.nbytes for _, t in weights) / 2**20,
        "bucket_mb": arguments.bucket_mb,
        "threads": THREADS,
        "versions": {"torch": torch.__version__, "vllm": generator.engine.platform.distribution},
        "seconds": summary(seconds),
        "processor_seconds": summary(processor),
        "all_seconds": {name: [round(v, 4) for v in values] for name, values in seconds.items()},
        "target": TARGET,
    }


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians, and both kinds of sync as multiples of a copy and a repacking."""
    middle = {name: median(values) for name, values in times.items()}
    floor = middle["copy"] + middle["repack"]
    of_turns = [s / (c + r) for c, r, s in zip(times["copy"], times["repack"], times["sync"], strict=True)]
    ratios = {f"{name} / (copy + repack)": middle[name] / floor for name in ("sync", "sync with canary")}
    ratios["sync / (copy + repack), median of turns"] = median(of_turns)
    return {name: round(value, 4) for name, value in (middle | ratios).items()}


def differences(folder: Path, lr: float, arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Of each step, and of step 0, which is sent whole: the share of the weights that changed in bf16, and MiB of the
    files. Each step learns other sequences."""
    path = str(arguments.differences)
    spec = ModelSpec(RoleSpec("policy", trained=True), path, "fp32")
    trainer = TorchTrainer(TorchTrainerConfig(lr=lr, device="cpu"), spec)
    ids, size = AutoTokenizer.from_pretrained(path)(TEXT.read_text())["input_ids"], SEQUENCES * TOKENS
    sent_weights, file = SentWeights({"bfloat16"}), folder / "bucket"
    for step in range(arguments.steps + 1):
        if step:
            rows = [ids[n : n + TOKENS] for n in range((step - 1) * size, step * size, TOKENS)]
            trainer.update([weigh(batch(rows), Nll().reduce())], Nll(), {}, {})
        changes, total = 0, 0
        sent_weights.begin(step)
        for bucket in trainer.buckets("live", arguments.bucket_mb * 2**20):
            for name, tensor in bucket.tensors if step else ():
                changes += int((tensor.bfloat16() != sent_weights.tensors[name]).sum())
                total += tensor.numel()
            sent_weights.write(bucket, file)
        line = {
            "lr": lr,
            "step": step,
            "share": round(changes / max(1, total), 5),
            "MiB": round(sent_weights.nbytes / 2**20, 2),
        }
        print(json.dumps(line), file=sys.stderr)
        yield line


if __name__ == "__main__":
    main()
