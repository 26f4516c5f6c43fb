"""Steps of a 0.6B model: one row of 16,384 tokens and 16 rows of 1,024, with the options that decide speed and memory.

Each part has tokens per second, MFU, and the peak of the device's memory beside that of ``rlhf plan``. The row of
16,384 tokens is the one that prime-rl publishes (``predictions.PRIME_RL``).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import machine
import shapes
import torch
from parts import NotRun, Part, Section
from predictions import BF16, CHECKPOINTED, DEFAULTS, MFU, OF_PLAN, PEAK, PLAIN, PRIME_RL, RATE
from rlhf.interfaces import ModelSpec, Trainer
from rlhf.interfaces.memory import TrainerWork
from rlhf_cli.plan.model_size import read_size
from rlhf_modeling import liger
from trained import nll, policy_spec, rows, trainer_class

LONG, SHORT, FEW = (16384,), (1024,) * 16, (1024,) * 4
SMALL = {LONG: (64,), SHORT: (16,) * 4, FEW: (16,)}
BF16_RATE = 989e12
"""Operations per second of dense bf16 products of an H100 or H200 SXM, by its data sheet, as prime-rl counts."""
GIVEN_BACK = 0.9
"""As in the section ``sleep``."""
PLAN_TOLERANCE = 0.25
"""Largest share by which the reserved memory may be above the plan. The plan's own tolerance on a processor."""


@dataclass(frozen=True)
class Arm:
    """One part of the section."""

    name: str
    lengths: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    """Of the trainer."""
    model: dict[str, Any] = field(default_factory=dict)
    """Of the model's spec."""
    trainer: str = "torch"
    repeats: int = 5


CHECKPOINTING: dict[str, Any] = {"gradient_checkpointing": True}
ARMS = (
    Arm(DEFAULTS, LONG),
    Arm("defaults, 16 x 1k", SHORT),
    Arm("defaults, 4 x 1k", FEW),
    Arm(CHECKPOINTED, LONG, model=CHECKPOINTING),
    Arm(f"{CHECKPOINTED}, inputs in host memory", LONG, {"offload_activations": True}, CHECKPOINTING),
    Arm(PLAIN, LONG, {"head_fp32": True, "logits_chunk": 2**24, "kernels": "none"}),
    Arm(BF16, LONG, {"head_fp32": False}),
    Arm(f"{CHECKPOINTED}, storage in bf16", LONG, model={**CHECKPOINTING, "storage": "bf16"}),
    Arm("head in fp32, 16 x 1k", SHORT, {"head_fp32": True}),
    Arm("head in bf16, 16 x 1k", SHORT, {"head_fp32": False}),
    Arm("kernels none, 16 x 1k", SHORT, {"kernels": "none"}),
    Arm("kernels own, 16 x 1k", SHORT, {"kernels": "own"}),
    Arm("kernels liger, 16 x 1k", SHORT, {"kernels": "liger"}),
    Arm("attention sdpa, 16 x 1k", SHORT, {"attention": "sdpa"}),
    Arm("fsdp on one rank, 16 x 1k", SHORT, trainer="fsdp", repeats=3),
    Arm("deepspeed stage 2 on one rank, 16 x 1k", SHORT, {"stage": 2}, trainer="deepspeed", repeats=3),
    Arm("deepspeed stage 3 on one rank, 16 x 1k", SHORT, {"stage": 3}, trainer="deepspeed", repeats=3),
)
"""In the order of their worth: the later ones are left out if the time ends."""


def run(section: Section) -> None:
    model = shapes.make_06b(section.shared, section.small)
    for arm in ARMS:
        packages = [arm.trainer] if arm.trainer == "deepspeed" else []
        section.part(arm.name, partial(measure, section, model, arm), needs=packages, seconds=20)
    section.part("optimizer aside, three times", partial(aside, section, model), seconds=20)


def measure(section: Section, model: Path, arm: Arm, part: Part) -> None:
    device, cuda = section.device, section.device == "cuda"
    if arm.options.get("attention"):
        section.needs_cuda()
    if arm.options.get("kernels") == "liger" and (reason := liger.why_not(device)):
        raise NotRun(reason)
    chosen, loss = trainer_class(arm.trainer), nll()
    config = chosen.Config(device=device, lr=1e-6, **arm.options)
    spec = policy_spec(model, **arm.model)
    lengths = SMALL[arm.lengths] if section.small else arm.lengths
    if cuda:
        part.figures["GiB before"] = torch.cuda.memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    trainer = chosen(config, spec)
    batch = rows(lengths, shapes.vocabulary(section.small), loss)
    applied = []
    times = machine.seconds_of(
        lambda: applied.append(trainer.update([batch], loss, {}, {})[1]), device, 1 if section.small else arm.repeats
    )
    part.holds("every step was taken", not any(a.skipped for a in applied))
    seconds, tokens = statistics.median(times), sum(lengths)
    part.figures |= {"tokens": tokens, "longest": max(lengths), "seconds": seconds, "all seconds": times}
    part.figures[RATE] = tokens / seconds
    part.figures |= {"gradient norm": applied[-1].grad_norm}
    planned = planned_gib(chosen, config, spec, lengths, device)
    part.figures["planned GiB"] = planned
    if arm.lengths == LONG and not section.small:
        part.figures["prime-rl"] = PRIME_RL
    if cuda:
        operations = sum(n * operations_per_token(model, n) for n in lengths)
        part.figures[MFU] = 100 * operations / seconds / BF16_RATE
        part.figures[PEAK] = torch.cuda.max_memory_allocated() / 2**30
        part.figures["reserved GiB"] = reserved = torch.cuda.max_memory_reserved() / 2**30
        part.figures[OF_PLAN] = reserved / planned["train"]  # the plan has an allowance for the allocator
        if not section.small:  # beside a tiny model the workspaces of the libraries are the most
            part.at_most(OF_PLAN, reserved / planned["train"], 1 + PLAN_TOLERANCE)


def operations_per_token(model: Path, tokens: int) -> float:
    """Forward and backward, as prime-rl counts (``trainer/perf.py``): 6 per parameter of a matrix, head included, and
    12 x layers x hidden x tokens for attention, as if it were not causal."""
    from transformers import AutoConfig

    c = AutoConfig.from_pretrained(model)
    attention = 2 * c.hidden_size * c.head_dim * (c.num_attention_heads + c.num_key_value_heads)
    layer = attention + 3 * c.hidden_size * c.intermediate_size
    matrices = c.num_hidden_layers * layer + c.vocab_size * c.hidden_size
    return float(6 * matrices + 12 * c.num_hidden_layers * c.hidden_size * tokens)


def planned_gib(
    chosen: type[Trainer], config: Any, spec: ModelSpec, lengths: Sequence[int], device: str
) -> dict[str, float]:
    """{phase: GiB on the device}, as ``rlhf plan`` estimates them."""
    longest = max(lengths)
    work = TrainerWork(longest=longest, unit=longest, units=len(lengths), micro_tokens=sum(lengths))
    phases = chosen.memory(config, spec, read_size(spec.path), work, device).phases
    return {name: sum(memory.device.values()) / 2**30 for name, memory in phases.items()}


def aside(section: Section, model: Path, part: Part) -> None:
    """``offload()`` and ``reload()``: the section ``sleep`` checks that the state survives, this one has the times."""
    chosen, loss, device = trainer_class("torch"), nll(), section.device
    trainer = chosen(chosen.Config(device=device), policy_spec(model))
    batch = rows((64,), shapes.vocabulary(section.small), loss)
    trainer.update([batch], loss, {}, {})
    turns = part.figures["turns"] = []
    moments = 8 * shapes.parameters(model)
    for turn in range(3):
        initial = machine.memory_used(device, tidy=True)
        [offload_seconds] = machine.seconds_of(trainer.offload, device, repeats=1, warmup=0)
        between = machine.memory_used(device)
        [reload_seconds] = machine.seconds_of(trainer.reload, device, repeats=1, warmup=0)
        turns.append({"offload seconds": offload_seconds, "reload seconds": reload_seconds})
        if initial is not None and between is not None:
            part.at_least(f"turn {turn}: given back, of the moments", (initial - between) / moments, GIVEN_BACK)
    _, applied = trainer.update([batch], loss, {}, {})
    part.holds("it goes on learning", not applied.skipped)
