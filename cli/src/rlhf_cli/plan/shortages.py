"""Checks whether a layout fits. If not, it reports the missing memory and its parts."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.interfaces.launcher import GENERATOR

from rlhf_cli.plan.layout import Layout
from rlhf_cli.plan.phases import PROCESS, GroupPlan, Moment, plan_groups, sum_of
from rlhf_cli.plan.units import text


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


def make_plan(layout: Layout) -> Plan:
    """The plan of every device in every phase, and the missing memory."""
    groups = tuple(plan_groups(layout))
    shortages = [s for g in groups for m in g.moments.values() if (s := _shortage(layout, g, m)) is not None]
    shortages += [s for g in groups for m in g.moments.values() if (s := _host(layout, g, m)) is not None]
    if (cache := _cache(layout)) is not None:
        shortages.append(cache)
    return Plan(layout, groups, tuple(shortages))


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
