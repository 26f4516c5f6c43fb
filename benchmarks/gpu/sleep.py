"""The phases of the hybrid engine: the device memory that sleep and offload release, and that no state is lost.

Memory is the device's own count (``torch.cuda.mem_get_info``), which sees every process.
"""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import machine
import shapes
import torch
from parts import NotRun, Part, Section
from rlhf.interfaces import Loss, Offloads, Trainer
from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_runtime.output.metrics import read_metrics
from rlhf_runtime.setup.build import train
from safetensors.torch import load_file
from sampled import draw_all, engine, policy, requests
from sync import one_device
from trained import nll, policy_spec, rows, trainer_class

KV_GIB = 4.0
GIVEN_BACK = 0.9
"""Smallest released share of the weights and the cache when the engine sleeps, and of AdamW's two moments when they are
offloaded. Other tensors in the same blocks of the allocator keep the rest."""


def run(section: Section) -> None:
    model = shapes.make(section.shared, section.small)
    for level in (1, 2):
        run_it = partial(asleep, section, model, level)
        section.part(f"vllm sleeps, level {level}", run_it, needs=("vllm",), seconds=40)
    middle = shapes.make_middle(section.shared, section.small)
    section.part("optimizer of torch aside", partial(aside, section, middle, "torch", {}), seconds=15)
    for stage in (2, 3):
        run_it = partial(aside, section, middle, "deepspeed", {"stage": stage})
        section.part(f"optimizer of deepspeed aside, stage {stage}", run_it, needs=("deepspeed",), seconds=30)
    section.part("a run in phases on Ray", partial(phases, section, model), needs=("ray", "vllm"), seconds=50)


def asleep(section: Section, model: Path, level: int, part: Part) -> None:
    """Samples after waking equal those before sleep; at level 2 this needs another sync."""
    device = section.device
    if level == 2:
        section.needs_cuda()
    space = KV_GIB if device == "cuda" else 0.25
    role = policy(model, device, "bf16")
    options: dict[str, Any] = {"sleep_level": level} if device == "cuda" else {}
    with engine(model, "bf16", kv_cache_gib=space, **options) as generator:
        sync = WeightSync(role, generator, SyncSection(), 0, print)
        sync.push(1)
        queries = requests(8, 24, 16, 1.0)
        reference = draw_all(generator, queries)
        memory = part.figures["bytes of the device"] = {"awake": machine.memory_used(device, tidy=True)}
        for turn in ("first", "second"):
            generator.sleep()
            memory[f"asleep, {turn}"] = machine.memory_used(device)
            if generator.wake():
                sync.refresh()
            memory[f"awake again, {turn}"] = machine.memory_used(device)
            after = draw_all(generator, queries)
            matches = [a.ids == b.ids and a.logprobs == b.logprobs for a, b in zip(reference, after, strict=True)]
            part.holds(f"samples after the {turn} wake are equal, bit for bit", all(matches))
    if device == "cuda":
        weights = sum(t.numel() for _, t in role.group.worker.weights()) * 2  # bf16
        total = weights + space * 2**30
        part.figures["bytes of weights and cache"] = total
        for turn in ("first", "second"):
            freed = memory["awake"] - memory[f"asleep, {turn}"]
            part.at_least(f"given back in the {turn} sleep, of weights and cache", freed / total, GIVEN_BACK)
            growth = memory[f"awake again, {turn}"] - memory[f"asleep, {turn}"]
            part.at_least(f"taken again at the {turn} wake, of weights and cache", growth / total, GIVEN_BACK)


def aside(section: Section, model: Path, name: str, options: dict[str, Any], part: Part) -> None:
    """The contents of a checkpoint are the same before and after, bit for bit."""
    chosen = trainer_class(name)
    if not issubclass(chosen, Offloads):
        raise NotRun(f"trainer {name!r} keeps its optimizer on the device: it is no Offloads")
    device, loss = section.device, nll()
    trainer = chosen(chosen.Config(device=device, lr=1e-3, **options), policy_spec(model))
    learn(trainer, loss)
    folder = section.work / f"states of {name} {options}"
    trainer.save(folder / "before")
    memory = part.figures["bytes of the device"] = {"with the optimizer": machine.memory_used(device, tidy=True)}
    trainer.offload()
    memory["put aside"] = machine.memory_used(device)
    trainer.reload()
    memory["back"] = machine.memory_used(device)
    trainer.save(folder / "after")
    files = sorted(p.relative_to(folder / "before") for p in (folder / "before").rglob("*") if p.is_file())
    matches = [same_state(folder / "before" / f, folder / "after" / f) for f in files]
    part.holds(f"the {len(files)} files of its state are equal", bool(files) and all(matches))
    norm, _, skipped = learn(trainer, loss)
    part.holds("it goes on learning", not skipped and math.isfinite(norm))
    shutil.rmtree(folder)
    if device == "cuda":
        moments = 8 * shapes.parameters(model)
        part.figures["bytes of the moments"] = moments
        freed = memory["with the optimizer"] - memory["put aside"]
        part.at_least("given back, of the moments", freed / moments, GIVEN_BACK)
        growth = memory["back"] - memory["put aside"]
        part.at_least("taken again, of the moments", growth / moments, GIVEN_BACK)


def same_state(first: Path, other: Path) -> bool:
    """Whether two files have the same bytes; for safetensors the same tensors, because metadata have no fixed order."""
    if first.suffix != ".safetensors":
        return first.read_bytes() == other.read_bytes()
    tensors, peers = load_file(first), load_file(other)
    return tensors.keys() == peers.keys() and all(torch.equal(tensor, peers[name]) for name, tensor in tensors.items())


def learn(trainer: Trainer, loss: Loss) -> tuple[float, float, str]:
    """One step on a fixed batch: (gradient norm, learning rate, why it was skipped)."""
    _, applied = trainer.update([rows((48,) * 4, 90, loss)], loss, {}, {})
    return applied.grad_norm, applied.lr, applied.skipped


def phases(section: Section, model: Path, part: Part) -> None:
    """Whole steps with policy and engine on one device: the engine sleeps while the policy learns."""
    run = train(one_device(section, model, steps=3))
    lines = read_metrics(run.directory.path / "metrics.jsonl")
    part.figures["steps"] = lines
    part.holds("three steps were made and learnt from", len(lines) == 3 and run.state.updates == 3)
