"""Check this installation, this machine, and what a run needs or has recorded."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command, Finding
from rlhf.interfaces.check import STATUSES
from rlhf_runtime.config.command_line import add_run_file, overrides

if TYPE_CHECKING:
    from rich.table import Table

    from rlhf_cli.doctor.examine import Request

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


class Doctor(Command):
    """Check this installation and this machine. With a run file or flags, also check what that run needs. With the
    folder of a run, compare the log-probs of its generator and its trainer: `rlhf doctor RUN`.

    Each check is shown when it ends: its name, the result (ok, warn, fail, skipped), what was found and what to do. The
    exit code is 1 if a check fails. Packages are imported in child processes. Only the names of environment variables
    are shown.

    For the folder of a run, the model is loaded and recomputes the log-probs of recorded samples. The report shows the
    difference by position in the context, and its cause.
    """

    name = "doctor"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_file(parser)
        parser.add_argument("--json", action="store_true", help="one JSON object")
        parser.add_argument("--start", action="store_true", help="also start and stop services, such as Ray")
        parser.add_argument(
            "--timeout", type=float, metavar="SECONDS", help="time limit for importing one package (default: 120)"
        )
        parser.add_argument("--step", type=int, metavar="N", help="for the folder of a run: step of the samples")
        parser.add_argument(
            "--samples", type=int, metavar="N", help="for the folder of a run: samples to compare (default: 32)"
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_cli.doctor.examine import Request, examine

        if args.run_file is not None and Path(args.run_file).is_dir():
            from rlhf_cli.doctor.run_gap import examine_run

            return examine_run(args)
        if args.step is not None or args.samples is not None:
            raise ConfigError("--step and --samples apply to the recorded samples of a run: name the folder of a run.")
        timeout = 120.0 if args.timeout is None else args.timeout
        if not timeout > 0:
            raise ConfigError(f"--timeout {timeout:g}: it must be more than 0 seconds")
        request = Request(args.run_file, overrides(args), args.start, timeout)
        checks = list(examine(request)) if args.json else _printed(request)
        failed = any(check.status == "fail" for check in checks)
        if args.json:
            summary = {"status": "fail" if failed else "ok", "checks": [asdict(check) for check in checks]}
            sys.stdout.write(json.dumps(summary, indent=2) + "\n")
        return 1 if failed else 0


def _printed(request: Request) -> list[Finding]:
    """The findings. Each is printed as soon as it is known, also to a pipe. A terminal also shows the name of the
    current check, because some checks take seconds."""
    from rich.console import Console

    from rlhf_cli.doctor.examine import examine

    console, errors = Console(), Console(stderr=True)
    watched = next((c for c in (console, errors) if c.is_terminal), None)
    status = watched.status("looking") if watched else None
    checks = []
    console.print(_row("check", "status", "result, and what to do", "bold"))
    with status or nullcontext():
        for check in examine(request, lambda name: status.update(f"looking at {name}") if status else None):
            todo = f"\nTo do: {check.remedy}" if check.remedy else ""
            console.print(_row(check.name, check.status, check.text + todo, STYLES[check.status]))
            checks.append(check)
    counts = Counter(check.status for check in checks)
    console.print(", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]))
    return checks


def _row(name: str, status: str, text: str, style: str) -> Table:
    """A line of a table. All lines have the same columns."""
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 2, 0, 0), expand=True)
    row.add_column(width=15, overflow="fold")
    row.add_column(width=7)
    row.add_column(ratio=1)
    row.add_row(Text(name), Text(status, style), Text(text))
    return row


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [Doctor]
