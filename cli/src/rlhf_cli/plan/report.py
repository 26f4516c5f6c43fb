"""The output of a plan: JSON, tables, and lines for ``rlhf train --dry-run``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text
from rlhf.interfaces.launcher import GENERATOR
from rlhf_runtime.checks.run import RunPlugins

from rlhf_cli.plan.from_run_file import layout_of
from rlhf_cli.plan.layout import Layout, Machine
from rlhf_cli.plan.nearest_change import Nearest
from rlhf_cli.plan.phases import PARTS, GroupPlan, Plan, make_plan, text
from rlhf_cli.plan.row_lengths import Lengths
from rlhf_cli.runs.output import terminal

if TYPE_CHECKING:
    from rlhf_cli.plan.step_time import StepTimes


def planned(run: RunPlugins, machine: Machine) -> tuple[Plan, list[str]]:
    """The plan of a checked run on ``machine``, and its assumptions."""
    plan = make_plan(layout_of(run, machine))
    return plan, list(assumptions(plan, lambda lengths: make_plan(layout_of(run, machine, lengths))))


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


def show(plan: Plan, change: Nearest | None, notes: Iterable[str], times: StepTimes | None) -> None:
    """Print the plan."""
    console = terminal()
    console.print(_placement(plan))
    for group in plan.groups:
        console.print(_memory(plan, group))
    style = {True: "green", False: "bold red", None: "yellow"}[plan.fits]
    console.print(verdict(plan), style=style)
    for line in [*notes, disk(plan.layout), *_reasons(plan, change)]:
        console.print(line, soft_wrap=True)
    if times is not None:
        console.print(times.table())
        for line in times.lines():
            console.print(line, soft_wrap=True)


def _placement(plan: Plan) -> Table:
    count = plan.layout.devices
    table = Table(title=f"Placement: {count} device{'s' if count > 1 else ''}", title_justify="left")
    for column in ("role", "where", "model", "parameters", "trained", "micro-batch", "arithmetic"):
        table.add_column(column)
    for name in plan.layout.places:
        placement = describe(plan.layout, name)
        if name in plan.layout.views:
            table.add_row(name, placement, "", "0", "no", "", "")
            continue
        if name == GENERATOR:
            assert plan.layout.engines is not None
            size = plan.layout.engines.size
            table.add_row(name, placement, size.path, f"{size.parameters:,}", "", "", "")
            continue
        role = plan.layout.role(name)
        trained = f"{role.memory.trained:,}" if role.trained else "no"
        tokens = f"{role.memory.micro_tokens} tokens" + (", checkpointed" if role.gradient_checkpointing else "")
        bf16 = "bf16" if role.memory.bf16 else "fp32"
        table.add_row(name, placement, role.size.path, f"{role.size.parameters:,}", trained, tokens, bf16)
    return table


def _memory(plan: Plan, group: GroupPlan) -> Table:
    devices = f"each of {group.group.count} devices, " if group.group.count > 1 else ""
    names = ", ".join(f"{n} x {count}" if count > 1 else n for n, count in group.group.holds.items())
    table = Table(title=f"Memory of {devices}{group.group.title} ({names})", title_justify="left")
    table.add_column("role")
    table.add_column("part")
    phases = list(group.moments)
    for phase in phases:
        table.add_column(phase, justify="right")
    rows = dict.fromkeys(name for m in group.moments.values() for name in m.rows)
    for name in rows:
        first = True
        for part in PARTS:
            sizes = [group.moments[p].rows.get(name, {}).get(part, 0) for p in phases]
            if any(sizes):
                table.add_row(name if first else "", part, *(text(s) if s else "" for s in sizes))
                first = False
    busy = [", ".join(group.moments[p].busy) for p in phases]
    table.add_section()
    table.add_row("busy", "", *busy)
    memory = plan.layout.machine.memory
    totals = [group.moments[p].total for p in phases]
    styles = ["bold red" if memory is not None and total > memory else "" for total in totals]
    table.add_row("total", "", *(Text(text(total), style) for total, style in zip(totals, styles, strict=True)))
    hosts = [group.moments[p].host for p in phases]
    if any(hosts):
        table.add_row("in host memory", "", *(text(h) if h else "" for h in hosts))
    return table


def _reasons(plan: Plan, change: Nearest | None) -> Iterable[str]:
    for shortage in plan.shortages:
        yield f"  {shortage.message}"
    if plan.shortages:
        worst = max(plan.shortages, key=lambda s: s.missing)
        yield f"The arithmetic of {worst.group}, phase {worst.phase!r}:"
        yield from (f"  {line}" for line in worst.arithmetic)
    if change is not None and change.plan.fits:
        yield f"The nearest change that fits: {change.command}"
    elif change is not None:
        flags = f" with {change.command}" if change.flags else ""
        left = max(change.plan.shortages, key=lambda s: s.missing).message if change.plan.shortages else ""
        yield f"No change that the plugins know makes it fit. The best attempt{flags}: {left}."
