"""Write one HTML page that shows runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command


class ReportCommand(Command):
    """Write a page about a run: `rlhf report runs/3`, or one that overlays several: `rlhf report runs/3 runs/4`.

    One HTML file, which opens without a network and without a server: curves, the time of a step, the timeline, samples
    with rewards and with log-probs and advantages of their tokens, answers of evaluations, what was left out and why,
    options, plugins. A run writes the page at its end (run.report); this command also writes it during a run.
    """

    name = "report"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run_folders", nargs="+", type=Path, metavar="RUN", help="folders of runs")
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="FILE",
            help="the page (default: report.html in the run's folder; for several runs, in the current folder)",
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_runtime.output.run_folder import REPORT
        from rlhf_runtime.report.page import report

        folders: list[Path] = args.run_folders
        if len({folder.resolve() for folder in folders}) < len(folders):
            raise ConfigError(f"RUN: {', '.join(map(str, folders))}: a run is named twice. Name it once.")
        page = args.output or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
        report(folders, page)
        sys.stdout.write(f"report: {page}\n")
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [ReportCommand]
