"""What a phase finds again of the heap of a process that does all phases in turn, on a CPU.

glibc gives the end of a heap back once 64 MiB of it are free, so what counts is what lies below something that stays.
Of what training takes the optimizer's states stay. They are made in the first step, when its gradients are there and
its activations have gone: they take the activations' places, and gradients lie between them. So after every step there
are:

1. the places of gradients, with holes. They are cut up, and what another phase takes is counted beside them.
2. what the first step took before there were states, less the states that are in it now. That is little where a model
   is trained, and nearly all where adapters are; it is in large pieces, and what another phase takes fits.

What activations of later steps take beyond that is at the end, where nothing that stays is made meanwhile: it is given
back, most of the time (docs/plan.md has how much was found). What sampling and forward passes take is counted as
staying; the next of them fits into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf.interfaces.launcher import GENERATOR

from rlhf_plugin_plan import formulas
from rlhf_plugin_plan.busy import left_by_forward, left_by_training
from rlhf_plugin_plan.engines import left_by_sampling
from rlhf_plugin_plan.heap import HOLES
from rlhf_plugin_plan.layout import Layout, RoleLayout

OTHERS = ("generate", "forward")
"""Phases of a step that leave something of the heap, beside training."""


def found_again(layout: Layout, names: Sequence[str], phase: str, busy: Sequence[str]) -> int:
    """Bytes of the heap in a phase of a step, beside what rests in it and what ``busy`` takes of it.

    Args:
        names: all that live in the process.
    """
    roles = [layout.role(name) for name in names if name != GENERATOR]
    others = max((left_by(layout, name, each) for name in names for each in OTHERS), default=0)
    beside = max((gradient_places(role) for role in roles), default=0) + others
    trains = left_by_training if phase == "train" else left_of_first_step
    was = max([beside, *map(trains, roles)])
    return max(0, was - max((left_by(layout, name, phase) for name in busy), default=0))


def left_by(layout: Layout, name: str, phase: str) -> int:
    """Bytes of the heap that this one's work in the phase takes, beside what rests in it. Precomputing roles leave
    nothing, as they go."""
    if name == GENERATOR:
        assert layout.engines is not None
        return left_by_sampling(layout.engines, layout.machine) if phase == "generate" else 0
    role = layout.role(name)
    works = {"generate": role.rewards, "forward": bool(role.annotated)}
    if phase == "train":
        return left_by_training(role)
    return left_by_forward(role) if works.get(phase) and not role.precomputed else 0


def gradient_places(role: RoleLayout) -> int:
    """Those of small gradients, which are made anew in every step, with holes as ``heap.HOLES`` counts them."""
    blocks = formulas.gradients(role.scattered_parameters, role.sharding)
    return blocks + int(HOLES * blocks)


def left_of_first_step(role: RoleLayout) -> int:
    """What the heap was before there were states of the optimizer, less those that were made then; weights and
    averages were there before."""
    s, count = role.sharding, role.scattered_parameters
    made = replace(s, master_bytes=0.0, average_bytes=0.0)
    first = left_by_training(replace(role, sharding=replace(made, optimizer_bytes=0.0, matrix_bytes=None)))
    return max(0, first - formulas.optimizer(count, made, min(count, role.trained_matrices)))
