"""A plan as JSON, and as lines for the output of ``rlhf train --dry-run``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlhf.interfaces.launcher import GENERATOR

from rlhf_cli.plan.layout import Layout
from rlhf_cli.plan.nearest_change import Nearest
from rlhf_cli.plan.phases import GroupPlan, Plan
from rlhf_cli.plan.row_lengths import Lengths
from rlhf_cli.plan.units import text


def as_json(plan: Plan, change: Nearest | None, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The plan as JSON values; sizes are in bytes."""
    machine = plan.layout.machine
    return {
        "fits": plan.fits,
        "device": machine.device,
        "device_memory": machine.memory,
        "host_memory": machine.host_memory,
        "devices": plan.layout.devices,
        "placement": [_place(plan.layout, name) for name in plan.layout.places],
        "groups": [_group(g) for g in plan.groups],
        "shortages": [
            {
                "where": s.group,
                "phase": s.phase,
                "missing": s.missing,
                "message": s.message,
                "arithmetic": list(s.arithmetic),
            }
            for s in plan.shortages
        ],
        "assumptions": list(notes),
        "checkpoints": {"bytes": plan.layout.checkpoint, "most": plan.layout.most_checkpoints},
        "nearest": None if change is None else {"flags": dict(change.flags), "fits": change.plan.fits},
    }


def _place(layout: Layout, name: str) -> dict[str, Any]:
    place = layout.places[name]
    line: dict[str, Any] = {"name": name, "ranks": place.ranks, "devices": place.devices, "share": place.share}
    if name == GENERATOR:
        assert layout.engines is not None
        return line | {"parameters": layout.engines.size.parameters, "trained": False}
    if name in layout.views:
        return line | {"model_of": layout.views[name].base_role, "parameters": 0, "trained": False}
    role = layout.role(name)
    return line | {
        "model": role.size.path,
        "parameters": role.size.parameters,
        "trained": role.trained,
        "trained_parameters": role.memory.trained,
        "micro_tokens": role.memory.micro_tokens,
        "gradient_checkpointing": role.gradient_checkpointing,
        "bf16": role.memory.bf16,
    }


def _group(plan: GroupPlan) -> dict[str, Any]:
    return {
        "title": plan.group.title,
        "count": plan.group.count,
        "holds": dict(plan.group.holds),
        "phases": {
            phase: {
                "busy": list(moment.busy),
                "total": moment.total,
                "host": moment.host,
                "rows": {name: dict(parts) for name, parts in moment.rows.items()},
            }
            for phase, moment in plan.moments.items()
        },
    }


def assumptions(plan: Plan, replan: Callable[[Lengths], Plan]) -> Iterable[str]:
    """The assumptions of the plan, and how much of the peak depends on lengths that are limits and not measured."""
    lengths = plan.layout.lengths
    if lengths is None:
        return

    def cost(shorter: Lengths) -> str:
        saving = _peak(plan) - _peak(replan(shorter))
        if saving <= 0:  # half as many tokens may need fewer micro-batches, whose gradients exist at another moment
            return "the peak is not lower if they are half as long"
        return f"if they are half as long, the peak is {text(saving)} lower"

    rows = "" if lengths.measured else f": {cost(lengths.with_half_the_rows())}"
    yield f"assumes {lengths.source}{rows}"
    if lengths.sampled:
        answers = cost(lengths.with_half_the_answer())
        yield f"assumes answers of {lengths.answer} tokens, the most that the run file allows: {answers}"


def _peak(plan: Plan) -> int:
    return max(group.peak.total for group in plan.groups)


def summary(plan: Plan) -> Iterable[str]:
    """Placement, totals by phase and the verdict, without the parts."""
    for name in plan.layout.places:
        yield f"place {name}: {describe(plan.layout, name)}"
    for group in plan.groups:
        totals = ", ".join(f"{phase} {text(m.total)}" for phase, m in group.moments.items())
        yield f"memory {group.group.title}: {totals}"
    yield verdict(plan)
    yield disk(plan.layout)


def describe(layout: Layout, name: str) -> str:
    """``4 engines of 2 devices on the devices of policy``."""
    place = layout.places[name]
    if not layout.machine.processes:
        return "in this process" + (
            f", {layout.views[name].base_role}'s without adapters" if name in layout.views else ""
        )
    if name in layout.views:
        owner, devices = layout.views[name].base_role, place.ranks * place.devices
        idle = "" if place.share else f"; {devices} device{'s' * (devices > 1)} of its own idle: share those of {owner}"
        return f"{owner}'s model without adapters{idle}"
    noun = "engine" if name == GENERATOR else "rank"
    count = f"{place.ranks} {noun}{'s' if place.ranks > 1 else ''}"
    if place.share is not None:
        engine_devices = f" of {place.devices} devices" if name == GENERATOR and place.devices > 1 else ""
        return f"{count}{engine_devices} on the devices of {place.share}"
    return f"{count} of {place.devices} device{'s' if place.devices > 1 else ''}"


def disk(layout: Layout) -> str:
    """The size of the checkpoints."""
    size, copies = layout.checkpoint, layout.most_checkpoints
    total = f"; the run has up to {copies} at a time: {text(copies * size)}" if copies > 1 else ""
    return f"a checkpoint takes about {text(size)} of disk{total}"


def verdict(plan: Plan) -> str:
    machine = plan.layout.machine
    holder = "the host" if machine.device == "cpu" else "a device"
    if machine.memory is None:
        return f"whether it fits is not known: give {holder}'s memory, e.g. --device-memory 80GiB"
    if plan.fits:
        return f"fits: {holder} has {text(machine.memory)}"
    return f"does not fit: {holder} has {text(machine.memory)}"
