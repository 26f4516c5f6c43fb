"""Show placement and memory, and whether a run fits."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.control_groups import machine_memory
from rlhf.errors import ConfigError
from rlhf.interfaces import Command
from rlhf_runtime.config.command_line import add_run_file, overrides

from rlhf_cli.plan.speeds import FLAGS

if TYPE_CHECKING:
    from rlhf_cli.plan.layout import Machine

UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)}
UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)}


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
        from rlhf_cli.plan.report import as_json, planned, show
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
            show(plan, change, notes, times)
        return 1 if plan.fits is False else 0


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


def parse(text: str, option: str) -> int:
    """``80GiB``, ``1.5 TB``, ``24000000000`` -> bytes.

    Raises ConfigError if ``text`` is not a number with one of :data:`UNITS`, or is less than 1 MiB, such as ``80``
    without its unit.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    factor = {name.lower(): value for name, value in UNITS.items()}.get(match.group(2).lower()) if match else None
    size = 0 if match is None or factor is None else int(float(match.group(1)) * factor)
    if size < 2**20:
        raise ConfigError(f"{option} is {text!r}; give a number and a unit, e.g. 80GiB, 80GB or 512MiB, at least 1MiB")
    return size


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


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [PlanCommand]
