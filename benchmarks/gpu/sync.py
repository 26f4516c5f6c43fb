"""Time of a weight sync to a vLLM engine, in this process and through Ray on the same GPU (CUDA IPC), against a plain
copy of as many bytes. Fingerprints and canaries are on, as in a run."""

from __future__ import annotations

import statistics
import typing
from functools import partial
from pathlib import Path
from typing import Any

import machine
import shapes
import torch
from mapped import seconds_mapped
from parts import Part, Section
from rlhf.plugins import Plugins
from rlhf.weights.bucket import buckets
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_runtime.setup.build import build
from rlhf_runtime.setup.prepare import prepare
from sampled import engine, policy

TURNS, WARMUP = 5, 2
REWARD = Path(__file__).resolve().parents[1] / "ours_reward.py"
SHARED = ("auto", "shared", "store")
"""Values of ``sync.transport`` for an engine on the policy's own devices. NCCL refuses two ranks on one GPU."""


def run(section: Section) -> None:
    model = shapes.make(section.shared, section.small)
    device = section.device
    section.part("copy and fingerprints", partial(plain, model, device))
    section.part("CUDA IPC between two processes", partial(ipc, section))
    section.part("vllm in this process", partial(in_process, model, device), needs=("vllm",), seconds=40)
    for transport in transports()[: 1 if section.small else None]:  # a small run tests the script, not transports
        name = f"vllm through Ray, transport {transport}"
        run_it = partial(through_ray, section, model, transport)
        section.part(name, run_it, needs=("ray", "vllm"), seconds=50)


def transports() -> tuple[str, ...]:
    """The transports of the run file that work on one shared device."""
    field = SyncSection.model_fields.get("transport")
    choices = typing.get_args(field.annotation) if field is not None else ()
    return tuple(t for t in SHARED if t in choices) or ("auto",)


def plain(model: Path, device: str, part: Part) -> None:
    """The lower bound of a sync's time (a copy), and the time of its proof on the sender's side."""
    role = policy(model, device, "bf16")
    weights = list(role.group.worker.weights())
    target = [torch.empty_like(tensor) for _, tensor in weights]
    nbytes = sum(tensor.nbytes for _, tensor in weights)

    def copy() -> None:
        for destination, (_, source) in zip(target, weights, strict=True):
            destination.copy_(source)

    def mark() -> None:
        for _ in buckets(weights, SyncSection().bucket_mb * 2**20, {}):
            pass

    part.figures |= {"parameters": sum(t.numel() for _, t in weights), "bytes": nbytes}
    for name, call in (("copy", copy), ("fingerprints", mark)):
        seconds = statistics.median(machine.seconds_of(call, device))
        part.figures[name] = {"seconds": seconds, "bytes per second": nbytes / seconds}


def ipc(section: Section, part: Part) -> None:
    """Whether another process can map a GPU's memory on this machine, and how fast that process copies it."""
    section.needs_cuda()
    nbytes = 2**24 if section.small else 2**30
    figures = seconds_mapped(nbytes, repeats=7)
    part.figures |= {"bytes": nbytes, **figures, "bytes per second": nbytes / figures["seconds"]}
    part.holds("the other process reads what this one wrote", figures["sum"] == figures["expected sum"])


def in_process(model: Path, device: str, part: Part) -> None:
    role = policy(model, device, "bf16")
    with engine(model, "bf16", kv_cache_gib=1.0 if device == "cuda" else 0.25) as generator:
        measure(WeightSync(role, generator, SyncSection(), 0, print), device, part)


def through_ray(section: Section, model: Path, transport: str, part: Part) -> None:
    """Policy and engine are processes on one device; the sync is the controller's own."""
    config = one_device(section, model, transport)
    run = build(prepare(config, Plugins.discover()))
    try:
        assert run.sampler is not None
        measure(run.sampler.weights, "cpu", part)  # its times end with an answer of the engine
    finally:
        run.status = "failed"  # no step was made: nothing to export
        run.close()


def one_device(
    section: Section,
    model: Path,
    transport: str | None = None,
    steps: int = 1,
    launcher: str = "ray",
    **generator: Any,
) -> RunFile:
    """A run whose policy and engine are processes on one device. ``generator``: options laid over; None leaves one
    out."""
    prompts = section.work / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{a}+{b}="}}\n' for a in range(4) for b in range(4)))
    gpu = section.device == "cuda"
    chosen = transport is not None and "transport" in SyncSection.model_fields
    engine = {"eager": True, "kv_cache_gib": 2.0 if gpu else 0.25, "max_sequences": 64, **generator}
    numbers = len(list(section.work.glob("run *")))
    return RunFile.model_validate(
        {
            "run": {"output": str(section.work / f"run {numbers} {transport}"), "steps": steps},
            "algorithm": "grpo",
            "policy": {"model": str(model), "dtype": "bf16"},
            "trainer": {"use": "torch", "device": section.device},
            "launcher": {"use": launcher, **({} if gpu else {"cpus": 2})},
            "placement": {"policy": {"ranks": 1}, "generator": {"share": "policy"}},
            "generator": {"use": "vllm", **{name: x for name, x in engine.items() if x is not None}},
            "sync": {"transport": transport} if chosen else {},
            "reward": f"file:{REWARD}:score",
            "data": {"train": str(prompts), "batch_size": 4, "max_tokens": 128},
            "sampling": {"samples_per_prompt": 4, "max_new_tokens": 32},
        }
    )


def measure(sync: WeightSync, device: str, part: Part) -> None:
    metrics: list[dict[str, float]] = []
    numbers = iter(range(1, 1000))
    times = machine.seconds_of(lambda: metrics.append(sync.push(next(numbers))), device, TURNS, WARMUP)
    seconds, nbytes = statistics.median(times), metrics[-1]["sync/MiB"] * 2**20
    part.figures |= {"bytes": nbytes, "seconds": seconds, "all seconds": times, "bytes per second": nbytes / seconds}
    part.figures |= {"metrics": metrics[-1]}
    part.holds("every sync was proven at the first try", all(t["sync/attempts"] == 1 for t in metrics))
