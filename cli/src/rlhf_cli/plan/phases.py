"""The plan of a layout: the memory of every group of devices in every phase of a run, and what it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.interfaces.launcher import GENERATOR
from rlhf.interfaces.memory import FP32, PhaseMemory
from rlhf_runtime.config.placement import neighbours

from rlhf_cli.plan.layout import DeviceGroup, EngineLayout, Layout, RoleLayout, device_groups

MIB = 2**20
PHASES = ("precompute", "load", "start", "generate", "sync", "forward", "train")
"""precompute: frozen roles read all rows and are removed; load: models are read; start: engines start on GPUs that hold
the models; generate: samples are drawn and scored; sync: engines that hold a copy get new weights; forward: the batch
is annotated; train: forward, backward and step."""
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "cache", "working", "allocator", "process")
"""As in :class:`rlhf.interfaces.memory.PhaseMemory`; process: memory of a process before it holds a model."""
PROCESS = "process"
"""The row of memory that belongs to no role."""
PROCESS_BYTES = {"cpu": 575 * MIB, "cuda": 1024 * MIB}
"""CPU: Python, torch, transformers and their libraries after the first pass (measured). GPU: context, kernels and
workspaces on the device, an allowance."""
TOKENIZER_BYTES = 1400
"""Host memory per token of the vocabulary (measured: tokenizers of the driver and of a trainer)."""

Parts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment of a phase with the highest memory use on one device."""

    phase: str
    busy: tuple[str, ...]
    """Roles that compute; the others only hold memory."""
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
    """{phase: moment} for the phases that the run has."""

    @property
    def peak(self) -> Moment:
        return max(self.moments.values(), key=lambda m: m.total)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A group of devices with too little memory in one phase, or a cache without room for a whole sequence."""

    group: str
    """The group's title."""
    phase: str
    missing: int
    """Bytes."""
    message: str
    """One line."""
    arithmetic: tuple[str, ...]
    """One line per part."""


@dataclass(frozen=True, slots=True)
class Plan:
    layout: Layout
    groups: tuple[GroupPlan, ...]
    shortages: tuple[Shortage, ...]

    @property
    def fits(self) -> bool | None:
        """None if the memory of a device is not known."""
        return None if self.layout.machine.memory is None else not self.shortages

    @property
    def missing(self) -> int:
        """Missing bytes over all groups and phases. A change must lower them."""
        return sum(s.missing for s in self.shortages)


def text(count: float) -> str:
    """``1.50 GiB``, ``320 MiB``; three significant digits."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            value = count / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{count:.0f} B"


def sum_of(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def make_plan(layout: Layout) -> Plan:
    """The plan of every device in every phase, and the missing memory."""
    groups = tuple(
        GroupPlan(group, {phase: _moment(layout, group, phase) for phase in phases_of(layout)})
        for group in device_groups(layout.places, layout.machine, layout.views)
    )
    shortages = [s for g in groups for m in g.moments.values() if (s := _shortage(layout, g, m)) is not None]
    shortages += [s for g in groups for m in g.moments.values() if (s := _host(layout, g, m)) is not None]
    if (cache := _cache(layout)) is not None:
        shortages.append(cache)
    return Plan(layout, groups, tuple(shortages))


def phases_of(layout: Layout) -> list[str]:
    engines = layout.engines
    roles = [r for r in layout.roles if not r.precomputed]
    have = {
        "precompute": len(roles) < len(layout.roles),
        "load": True,
        "start": starts_beside_roles(layout),
        "generate": engines is not None,
        "sync": engines is not None and engines.memory.copy,
        "forward": any(r.annotates for r in roles),
        "train": any(r.trained for r in roles),
    }
    return [phase for phase in PHASES if have[phase]]


def starts_beside_roles(layout: Layout) -> bool:
    """Whether engines start on GPUs that already hold roles."""
    engines, machine = layout.engines, layout.machine
    if engines is None or not engines.memory.copy or machine.device != "cuda":
        return False
    return not machine.processes or _shares_with_engines(layout, GENERATOR)


def occupied(layout: Layout) -> int:
    """Bytes that roles and processes use when engines start, on the engines' device with the highest use."""
    groups = [g for g in device_groups(layout.places, layout.machine, layout.views) if GENERATOR in g.holds]
    largest = 0
    for group in groups:
        moment = _memory_in(layout, group, "start", ())
        engine = moment.rows[GENERATOR]
        largest = max(largest, moment.total - sum_of(engine) + engine.get(PROCESS, 0))
    return largest


def _moment(layout: Layout, group: DeviceGroup, phase: str) -> Moment:
    """The moment with the highest use. Roles compute one after the other, except that rewards are computed while
    processes generate."""
    workers = [name for name in group.holds if _works(layout, name, phase)]
    at_once = phase == "generate" and layout.machine.processes
    turns: list[tuple[str, ...]] = [tuple(workers)] if at_once else [(name,) for name in workers]
    moments = [_memory_in(layout, group, phase, busy) for busy in turns or [()]]
    return max(moments, key=lambda m: (m.total, sum(sum_of(m.rows[name]) for name in m.busy)))


def _works(layout: Layout, name: str, phase: str) -> bool:
    if name == GENERATOR:
        return phase in ("start", "generate")
    role = layout.role(name)
    if role.precomputed or phase == "precompute":
        return role.precomputed and phase == "precompute"
    return {
        "load": True,
        "start": False,
        "generate": role.rewards,
        "sync": name == "policy",
        "forward": role.annotates,
        "train": role.trained,
    }[phase]


def _memory_in(layout: Layout, group: DeviceGroup, phase: str, busy: tuple[str, ...]) -> Moment:
    machine = layout.machine
    rows: dict[str, Parts] = {}
    host = 0
    for name, ranks in group.holds.items():
        early = name != GENERATOR and layout.role(name).precomputed
        if early != (phase == "precompute"):
            continue
        memory = _engine(layout, phase, name in busy) if name == GENERATOR else _role(layout, name, phase, name in busy)
        if name == GENERATOR and machine.device == "cpu" and layout.engines is not None:
            ranks *= layout.engines.devices  # all workers of an engine are on the host
        parts = dict(memory.device)
        if machine.processes:
            parts[PROCESS] = _process(layout, name)
        rows[name] = {part: size * ranks for part, size in parts.items() if size}
        host += memory.host * ranks
    if not machine.processes:
        _reuse_freed(rows, busy)
        rows[PROCESS] = {PROCESS: max(_process(layout, name) for name in group.holds)}
    return Moment(phase, busy, rows, host)


def _process(layout: Layout, name: str) -> int:
    """Memory in bytes, besides the model, of a process that holds this role or an engine."""
    device = layout.machine.device
    size = layout.engines.size if name == GENERATOR and layout.engines else layout.role(name).size
    return PROCESS_BYTES[device] + (TOKENIZER_BYTES * size.vocabulary if device == "cpu" else 0)


def _reuse_freed(rows: Mapping[str, Parts], busy: tuple[str, ...]) -> None:
    """In one process, the next role that trains reuses the memory of the gradients that another role freed."""
    idle = sorted((n for n, parts in rows.items() if n not in busy), key=lambda n: rows[n].get("allocator", 0))
    need = sum(rows[name].get("gradients", 0) + rows[name].get("activations", 0) for name in busy)
    for name in idle:
        freed = rows[name].pop("allocator", 0)
        if name == idle[-1] and freed > need:
            rows[name]["allocator"] = freed - need


def _role(layout: Layout, name: str, phase: str, busy: bool) -> PhaseMemory:
    role = layout.role(name)
    memory = _memory_of_role(layout, role, phase, busy)
    additions = {"weights": role.borrowed, "working": _sending(layout, role) if busy and phase == "sync" else 0}
    parts = dict.fromkeys([*memory.device, *additions])
    return PhaseMemory({part: memory.device.get(part, 0) + additions.get(part, 0) for part in parts}, memory.host)


def _sending(layout: Layout, role: RoleLayout) -> int:
    """Memory in bytes that a rank needs to send weights: a bucket of copies, and the two buffers that engines map."""
    engines = layout.engines
    if engines is None:
        return 0
    mapped = engines.mapped and _shares_with_engines(layout, role.name)
    buffers = min(2 * engines.bucket, role.size.parameters * FP32) if mapped else 0
    return (engines.bucket if role.memory.copies else 0) + buffers


def _memory_of_role(layout: Layout, role: RoleLayout, phase: str, busy: bool) -> PhaseMemory:
    phases = role.memory.phases
    if phase in ("load", "start"):
        resting = {part: size for part, size in phases["rest"].device.items() if part in ("weights", "working")}
        return PhaseMemory(phases["load"].device if busy else resting, phases["rest"].host)
    if busy and phase == "train":
        return phases["train"]
    if busy and phase in ("precompute", "forward", "generate"):
        return phases["forward"]
    offloaded = phase in ("generate", "sync") and _shares_with_engines(layout, role.name)
    return phases["offloaded" if offloaded else "rest"]


def _engine(layout: Layout, phase: str, busy: bool) -> PhaseMemory:
    engines = layout.engines
    assert engines is not None
    phases, turns = engines.memory.phases, engines.memory.sleeps and _shares_with_engines(layout, GENERATOR)
    if phase == "load":  # engines start after the models are loaded
        return PhaseMemory({})
    if busy:
        return phases["generate"]
    if phase == "sync":
        return _syncing(engines, phases["rest"], cache=engines.canaries or not turns)
    return phases["asleep" if turns and phase in ("forward", "train") else "rest"]


def _syncing(engines: EngineLayout, rest: PhaseMemory, *, cache: bool) -> PhaseMemory:
    parts = {part: size for part, size in rest.device.items() if cache or part != "cache"}
    return PhaseMemory(parts | {"working": parts.get("working", 0) + engines.bucket}, rest.host)


def _shares_with_engines(layout: Layout, name: str) -> bool:
    """Whether ``name`` is on devices that both an engine and a role use. They compute in turns there."""
    sharers = neighbours(layout.places, GENERATOR) if layout.engines is not None else []
    return bool(sharers) if name == GENERATOR else name in sharers


def _shortage(layout: Layout, group: GroupPlan, moment: Moment) -> Shortage | None:
    memory = layout.machine.memory
    if memory is None or moment.total <= memory:
        return None
    missing = moment.total - memory
    message = (
        f"{group.group.title}: the phase {moment.phase!r} needs {text(moment.total)} of a {_device(layout)}'s "
        f"{text(memory)}, {text(missing)} more than it has"
    )
    return Shortage(group.group.title, moment.phase, missing, message, tuple(arithmetic(layout, moment)))


def _host(layout: Layout, group: GroupPlan, moment: Moment) -> Shortage | None:
    """Shortage of host memory, which all devices of a node use."""
    machine = layout.machine
    devices = min(machine.devices_per_node, group.group.count)
    if machine.host_memory is None or moment.host * devices <= machine.host_memory:
        return None
    missing = moment.host * devices - machine.host_memory
    message = (
        f"{group.group.title}: in the phase {moment.phase!r} {devices} devices of a node put {text(moment.host)} each "
        f"in host memory, {text(moment.host * devices)} of {text(machine.host_memory)}: {text(missing)} too much"
    )
    return Shortage(group.group.title, moment.phase, missing, message, ())


def _cache(layout: Layout) -> Shortage | None:
    engines = layout.engines
    if engines is None or layout.machine.memory is None or engines.memory.cache is None:
        return None
    space, token, formulas = engines.memory.cache, engines.memory.cache_token, engines.memory.arithmetic
    need = int(token * engines.longest)
    if space >= need:
        return None
    message = (
        f"{GENERATOR}: its cache has room for {int(space / token) if token else 0} tokens ({text(space)} per device), "
        f"but the longest sequence has {engines.longest} ({text(need)})"
    )
    return Shortage(GENERATOR, "generate", need - space, message, tuple(formulas.values()))


def _device(layout: Layout) -> str:
    return "host" if layout.machine.device == "cpu" else "device"


def arithmetic(layout: Layout, moment: Moment) -> list[str]:
    """Lines ``role part size = formula``, largest first."""
    lines = []
    for name, parts in sorted(moment.rows.items(), key=lambda row: -sum_of(row[1])):
        for part, size in sorted(parts.items(), key=lambda p: -p[1]):
            if size < 2**20:
                continue
            formula = _arithmetic(layout, name, part)
            lines.append(f"{name} {part} {text(size)}" + (f" = {formula}" if formula else ""))
    return lines


def _arithmetic(layout: Layout, name: str, part: str) -> str:
    if part == PROCESS:
        return "before it holds a model"
    if name == GENERATOR and layout.engines is not None:
        return layout.engines.memory.arithmetic.get(part, "")
    role = layout.role(name)
    heads = f" + {text(role.borrowed)} of heads that others lend" if part == "weights" and role.borrowed else ""
    return role.memory.arithmetic.get(part, "") + heads
