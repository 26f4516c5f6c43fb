"""Memory of every device in every phase: what rests there, and what the busy role adds at its peak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf.interfaces.launcher import GENERATOR

from rlhf_plugin_plan import formulas
from rlhf_plugin_plan.again import found_again
from rlhf_plugin_plan.busy import Parts, forwarding, left, sum_of, training
from rlhf_plugin_plan.engines import engine_resting, sampling
from rlhf_plugin_plan.layout import DeviceGroup, EngineLayout, Layout, RoleLayout, device_groups

PHASES = ("precompute", "load", "generate", "sync", "forward", "train")
"""precompute: frozen roles read all rows, then go; load: models are read; generate: samples are drawn and scored; sync:
weights go to engines that hold their own; forward: the batch is annotated; train: forward, backward and step."""
LOADED = ("weights", "working")
"""Parts that rest on a device from loading on; states and gradients come with the first step."""
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "cache", "working", "allocator", "process")
"""logits: the log-prob peak; cache: keys and values of the generator; working: temporaries, gathered weights, casts and
buffers; allocator: freed and not given back; process: what a process takes before it holds a model."""
PROCESS = "process"
"""The row of what belongs to no role."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The fullest moment of a phase on one device."""

    phase: str
    busy: tuple[str, ...]
    """Who computes; the others rest."""
    rows: Mapping[str, Parts]
    """{role: {part: bytes}}."""
    host: int
    """Bytes in host memory for this device."""

    @property
    def total(self) -> int:
        return sum(map(sum_of, self.rows.values()))


@dataclass(frozen=True, slots=True)
class GroupPlan:
    group: DeviceGroup
    moments: Mapping[str, Moment]
    """By phase; only phases that the run has."""

    @property
    def peak(self) -> Moment:
        return max(self.moments.values(), key=lambda m: m.total)


# ------------------------------------------------------------------------------------------ a role


def resting(role: RoleLayout, *, aside: bool = False) -> tuple[Parts, int]:
    """(parts on the device, bytes on the host) of one rank that computes nothing.

    Args:
        aside: the trainer's ``offload()`` was called.
    """
    s, trained = role.sharding, role.trained_parameters
    own = role.shape.parameters + (trained if s.adapter_rank else 0)
    held = {"weights": formulas.weights(own, s), "optimizer": formulas.optimizer(trained, s, role.trained_matrices)}
    held["gradients"] = formulas.gradients(trained, s) if s.keeps_gradients else 0
    elsewhere = {"weights": s.host_weights, "optimizer": s.host_optimizer or (aside and s.offloads)}
    elsewhere["gradients"] = elsewhere["optimizer"]
    here = {part: size for part, size in held.items() if size and not elsewhere[part]}
    if kept := formulas.file_kept(role.shape, s):
        here["weights"] = here.get("weights", 0) + kept
    if role.borrowed:
        here["weights"] = here.get("weights", 0) + role.borrowed
    if s.buffers:
        here["working"] = s.buffers
    return here, sum(size for part, size in held.items() if elsewhere[part])


def loading(role: RoleLayout, device: str) -> Parts:
    """While its model is read: all weights that one rank holds for a moment, and the larger of what it maps of the file
    and of what it needs to make its buffers. A divided language model computes once, for its head to be checked. What
    is put together of several tensors of the file, such as experts, is beside them; so are the largest one's parts.
    Of a file that stays mapped, what nothing computes with yet is not there yet."""
    s, shape = role.sharding, role.shape
    on_cpu = device == "cpu"
    read = shape.read if shape.read and on_cpu else shape.parameters
    made = int(role.trained_parameters * s.making_bytes) + (s.buffers if s.making_bytes else 0)
    if shape.outputs == shape.vocabulary:
        made += formulas.gathered(shape, s, ahead=False).all
    mapped = int(shape.parameters * s.weight_bytes) if s.reads_whole and on_cpu else 0
    if shape.merged:
        made += int(max(layer.largest for layer in shape.layers) * s.weight_bytes)
    merged = shape.merged * formulas.FP32 if on_cpu and s.loading_ranks == 1 else 0
    weights = int(read * s.weight_bytes / s.loading_ranks) + merged - formulas.file_unread(shape, s)
    return {"weights": weights, "working": max(mapped, made)}


# --------------------------------------------------------------------------------------- a device


def plan_groups(layout: Layout) -> list[GroupPlan]:
    """Every group of equal devices, in every phase that the run has."""
    return [
        GroupPlan(group, {phase: _moment(layout, group, phase) for phase in phases_of(layout)})
        for group in device_groups(layout.places, layout.machine, layout.views)
    ]


def phases_of(layout: Layout) -> list[str]:
    engines = layout.engines
    roles = [r for r in layout.roles if not r.precomputed]
    have = {
        "precompute": len(roles) < len(layout.roles),
        "load": True,
        "generate": engines is not None,
        "sync": engines is not None and engines.footprint.weight_bytes > 0,
        "forward": any(bool(r.annotated) for r in roles),
        "train": any(r.trained for r in roles),
    }
    return [phase for phase in PHASES if have[phase]]


def _moment(layout: Layout, group: DeviceGroup, phase: str) -> Moment:
    """The fullest: with each busy role in turn, or with all that may be busy at once."""
    workers = [name for name in group.holds if _works(layout, name, phase)]
    at_once = phase == "generate" and layout.machine.processes  # scores are computed beside the sampling
    turns: list[tuple[str, ...]] = [tuple(workers)] if at_once else [(name,) for name in workers]
    moments = [_at(layout, group, phase, busy) for busy in turns or [()]]
    fullest = max(moments, key=lambda m: (m.total, sum(sum_of(m.rows[name]) for name in m.busy)))
    return _with_left(layout, fullest, list(group.holds))


def _with_left(layout: Layout, moment: Moment, names: Sequence[str]) -> Moment:
    """In one process on a CPU: with what the phase finds of the heap again. Precomputing roles leave nothing, as they
    go."""
    machine = layout.machine
    if machine.device != "cpu" or machine.processes or moment.phase in ("precompute", "load"):
        return moment
    more = {"allocator": found_again(layout, names, moment.phase, moment.busy)}
    return replace(moment, rows={**moment.rows, PROCESS: _add(moment.rows[PROCESS], more)})


def _works(layout: Layout, name: str, phase: str) -> bool:
    if name == GENERATOR:
        return phase == "generate"
    role = layout.role(name)
    if role.precomputed or phase == "precompute":
        return role.precomputed and phase == "precompute"
    return {
        "load": True,
        "generate": role.rewards,
        "sync": name == "policy",
        "forward": bool(role.annotated),
        "train": role.trained,
    }[phase]


def _at(layout: Layout, group: DeviceGroup, phase: str, busy: tuple[str, ...]) -> Moment:
    rows: dict[str, Parts] = {}
    host = 0
    for name, ranks in group.holds.items():
        early = name != GENERATOR and layout.role(name).precomputed
        if early != (phase == "precompute"):
            continue
        if name == GENERATOR:
            assert layout.engines is not None
            parts, away = _engine_parts(layout, layout.engines, phase, name in busy), 0
            ranks *= _parts_here(layout)
        else:
            parts, away = _role_parts(layout, layout.role(name), phase, name in busy)
        if layout.machine.processes:
            parts = _add(parts, {"process": formulas.PROCESS[layout.machine.device]})
            parts = _add(parts, {"working": formulas.LIBRARIES[layout.machine.device]})
        rows[name] = {part: size * ranks for part, size in parts.items() if size}
        host += away * ranks
    if not layout.machine.processes:
        device = layout.machine.device
        rows[PROCESS] = {"process": formulas.PROCESS[device], "working": formulas.LIBRARIES[device]}
    return Moment(phase, busy, rows, host)


def _parts_here(layout: Layout) -> int:
    """Parts of one engine in a group: on a CPU all of them are on the host, on GPUs one on each device."""
    assert layout.engines is not None
    footprint = layout.engines.footprint
    return footprint.tensor_parallel * footprint.pipeline_parallel if layout.machine.device == "cpu" else 1


def _role_parts(layout: Layout, role: RoleLayout, phase: str, busy: bool) -> tuple[Parts, int]:
    machine = layout.machine
    aside = phase in ("generate", "sync") and _shares_with_engines(layout, role.name)  # from the sync on
    parts, host = resting(role, aside=aside)
    if phase == "load":
        loaded = {k: v for k, v in parts.items() if k in LOADED}
        loaded["weights"] = loaded.get("weights", 0) - formulas.file_unread(role.shape, role.sharding)
        return (loading(role, machine.device) if busy else loaded), host
    if busy and phase == "train":
        added, away = training(role, machine.device)
        return _add({k: v for k, v in parts.items() if k != "gradients"}, added), host + away
    if busy and phase in ("precompute", "forward", "generate"):
        return _add(parts, forwarding(role, machine.device)), host
    if busy and phase == "sync":
        assert layout.engines is not None
        s = role.sharding
        spread = s.weight_ranks > 1 or s.layer_ranks > 1 or s.host_weights
        return _add(parts, {"working": layout.engines.bucket if spread else 0}), host
    if machine.device == "cpu" and machine.processes:  # its process keeps its heap, and the others cannot have it
        parts = _add(parts, {"allocator": left(role)})
    return parts, host


def _engine_parts(layout: Layout, engines: EngineLayout, phase: str, busy: bool) -> Parts:
    machine, shares = layout.machine, _shares_with_engines(layout, GENERATOR)
    if phase == "load":
        return engine_resting(engines, machine, asleep=False)
    asleep = shares and engines.footprint.sleeps and phase in ("forward", "train")
    cache = phase != "sync" or engines.canaries or not (shares and engines.footprint.sleeps)
    parts = engine_resting(engines, machine, asleep=asleep, cache=cache)
    if phase == "sync":
        return _add(parts, {"working": engines.bucket})
    return _add(parts, sampling(engines, machine)) if busy else parts


def _shares_with_engines(layout: Layout, name: str) -> bool:
    """Lives on devices on which both an engine and a role do (the hybrid engine's phases)."""
    places = layout.places
    if GENERATOR not in places:
        return False
    home = places[GENERATOR].share or GENERATOR
    mine = places[name].share or name
    others = [n for n, place in places.items() if n != GENERATOR and (place.share or n) == home]
    return mine == home and bool(others)


def _add(parts: Mapping[str, int], more: Mapping[str, int]) -> Parts:
    return {name: parts.get(name, 0) + more.get(name, 0) for name in dict.fromkeys([*parts, *more])}


def busiest(groups: Iterable[GroupPlan]) -> GroupPlan:
    """The group with the fullest device."""
    return max(groups, key=lambda g: g.peak.total)
