"""Check this installation, this machine, and what a run needs."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command, Finding
from rlhf.interfaces.check import STATUSES
from rlhf_runtime.config.command_line import add_run_file, overrides

if TYPE_CHECKING:
    from rlhf_plugin_doctor.examine import Request

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


class Doctor(Command):
    """Check this installation and this machine. With a run file or flags, also check what that run needs.

    Each line shows the name of the check, the result (ok, warn, fail, skipped), what was found and what to do. The exit
    code is 1 if a check fails. Packages are imported in child processes. Of environment variables only the names are
    shown.
    """

    name = "doctor"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_file(parser)
        parser.add_argument("--json", action="store_true", help="one JSON object: status and checks")
        parser.add_argument("--start", action="store_true", help="also start and stop services, such as a Ray")
        parser.add_argument(
            "--timeout", type=float, default=120.0, metavar="SECONDS", help="for importing one package (default: 120)"
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_plugin_doctor.examine import Request, examine

        if not args.timeout > 0:
            raise ConfigError(f"--timeout {args.timeout:g}: seconds, more than 0")
        request = Request(args.run_file, overrides(args), args.start, args.timeout)
        checks = list(examine(request)) if args.json else _watched(request)
        failed = any(check.status == "fail" for check in checks)
        if args.json:
            summary = {"status": "fail" if failed else "ok", "checks": [asdict(check) for check in checks]}
            sys.stdout.write(json.dumps(summary, indent=2) + "\n")
        else:
            _show(checks)
        return 1 if failed else 0


def _watched(request: Request) -> list[Finding]:
    """The findings. A terminal shows the name of the current check, because some take seconds."""
    from rich.console import Console

    from rlhf_plugin_doctor.examine import examine

    console = Console(stderr=True)
    status = console.status("looking") if console.is_terminal else None
    with status or nullcontext():
        return list(examine(request, lambda name: status.update(f"looking at {name}") if status else None))


def _show(checks: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "status", "found", "what to do", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for check in checks:
        cells = (check.name, Text(check.status, STYLES[check.status]), Text(check.found), Text(check.remedy))
        table.add_row(*cells)
    counts = Counter(check.status for check in checks)
    console = Console()
    console.print(table)
    console.print(", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]))


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [Doctor]
