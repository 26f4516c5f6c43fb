"""Show placement and memory, and whether a run fits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.control_groups import machine_memory
from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR, Command
from rlhf_runtime.config.command_line import add_run_file, overrides

from rlhf_cli.plan.speeds import FLAGS
from rlhf_cli.plan.units import parse, text

if TYPE_CHECKING:
    from rich.table import Table
    from rlhf_runtime.checks.run import RunPlugins

    from rlhf_cli.plan.layout import Machine
    from rlhf_cli.plan.nearest_change import Nearest
    from rlhf_cli.plan.phases import GroupPlan, Plan
    from rlhf_cli.plan.step_time import StepTimes


class PlanCommand(Command):
    """Show which role is on which device, how much memory each phase needs there, and whether the run fits.

    The run file and flags are those of `rlhf train`. The rows are tokenised for their lengths, if their files are on
    this machine. Of a model only its config.json is read, and its processor if the run has images; nothing is loaded or
    started. If the run does not fit, the exit code is 1, and the output shows why, with the arithmetic, and the nearest
    change that makes the run fit. With the speeds of a short run (--speeds) it shows step times too.
    """

    name = "plan"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_file(parser)
        parser.add_argument(
            "--device", choices=("cpu", "cuda"), help="default: cuda with --device-memory or a GPU, else cpu"
        )
        parser.add_argument(
            "--device-memory",
            metavar="SIZE",
            help="memory of one GPU, or of a CPU's host: 80GiB, 24GB; default: that of this machine",
        )
        parser.add_argument(
            "--host-memory", metavar="SIZE", help="host memory of a node with GPUs, to check offloaded states"
        )
        parser.add_argument(
            "--devices-per-node", type=int, default=8, metavar="N", help="GPUs of one node (default: 8)"
        )
        parser.add_argument("--json", action="store_true", help="one JSON object, sizes in bytes")
        parser.add_argument(
            "--speeds", metavar="RUN", type=Path, help="also show step times, from the speeds of the run in this folder"
        )
        for name, (metavar, meaning) in FLAGS.items():
            parser.add_argument(f"--{name}", metavar=metavar, help=f"step times: {meaning}")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.plugins import Plugins
        from rlhf_runtime.config.load import load

        from rlhf_cli.plan.from_run_file import planned_run
        from rlhf_cli.plan.nearest_change import nearest
        from rlhf_cli.plan.report import as_json
        from rlhf_cli.plan.step_time import step_times

        flags, plugins = overrides(args), Plugins.discover()
        machine = target(args.device, args.device_memory, args.host_memory, args.devices_per_node)
        config = load(args.run_file, flags)
        run = planned_run(config, plugins, machine.device)
        times = step_times(args, run, run.places_on(machine.device))
        plan, notes = planned(run, machine)
        change = None
        if plan.fits is False:
            change = nearest(plan, plugins, lambda changes: load(args.run_file, [*flags, *changes.items()]))
        if args.json:
            figures = as_json(plan, change, notes) | ({} if times is None else {"step_time": times.as_json()})
            sys.stdout.write(json.dumps(figures, indent=2) + "\n")
        else:
            _show(plan, change, notes, times)
        return 1 if plan.fits is False else 0


def planned(run: RunPlugins, machine: Machine) -> tuple[Plan, list[str]]:
    """The plan of a checked run on ``machine``, and its assumptions."""
    from rlhf_cli.plan.from_run_file import layout_of
    from rlhf_cli.plan.phases import make_plan
    from rlhf_cli.plan.report import assumptions

    plan = make_plan(layout_of(run, machine))
    return plan, list(assumptions(plan, lambda lengths: make_plan(layout_of(run, machine, lengths))))


def show_summary(plan: Plan, notes: Iterable[str]) -> None:
    """Placement and memory as a few comments of a run file."""
    from rlhf_cli.plan.report import summary

    sys.stdout.write("".join(f"# {line}\n" for line in [*summary(plan), *notes]))


def target(
    device: str | None = None,
    memory: str | None = None,
    host_memory: str | None = None,
    devices_per_node: int = 8,
) -> Machine:
    """The machine of the flags.

    Args:
        device: ``cpu`` | ``cuda``; None: a GPU if ``memory`` is set or torch sees one, else a CPU.
        memory: memory of one device (on CPUs: of the host), e.g. ``80GiB``. None: that of this machine.
        host_memory: memory of the host of ``devices_per_node`` GPUs.

    Raises ConfigError if a size cannot be read or a flag does not fit the device.
    """
    from rlhf_cli.plan.layout import Machine

    if devices_per_node < 1:
        raise ConfigError(f"--devices-per-node {devices_per_node} must be at least 1")
    gpu = gpu_memory()
    if device is None:
        device = "cuda" if memory is not None or gpu is not None else "cpu"
    if device == "cpu" and host_memory is not None:
        raise ConfigError("--host-memory applies to nodes with GPUs; on a CPU --device-memory is the host's memory")
    device_memory = gpu if device == "cuda" else cpu_memory()
    size = device_memory if memory is None else parse(memory, "--device-memory")
    host = None if host_memory is None else parse(host_memory, "--host-memory")
    return Machine(device, size, host, devices_per_node)


def gpu_memory() -> int | None:
    """Memory in bytes of the first GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def cpu_memory() -> int | None:
    """Memory in bytes that this process may use on this host; None if the system does not report it."""
    memory = machine_memory()
    return None if memory is None else memory.limit or memory.total


def _show(plan: Plan, change: Nearest | None, notes: Iterable[str], times: StepTimes | None) -> None:
    from rlhf_cli.plan.report import disk, verdict
    from rlhf_cli.runs.output import terminal

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
    from rich.table import Table

    from rlhf_cli.plan.report import describe

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
    from rich.table import Table
    from rich.text import Text

    from rlhf_cli.plan.phases import PARTS

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


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [PlanCommand]
