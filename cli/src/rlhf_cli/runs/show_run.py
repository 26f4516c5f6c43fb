"""Show one run, or compare two."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command


class ShowCommand(Command):
    """Show a run: `rlhf show runs/3`, or two of them side by side: `rlhf show runs/3 runs/4`.

    For one run it shows the options that were set, plugins with their versions, progress, metrics with curves,
    checkpoints and exports, how the run ended, and the command that continues it. For two runs it shows the options and
    plugins that differ, and the metrics and curves of both. It can also be used during a run.
    """

    name = "show"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of a run, e.g. runs/latest")
        parser.add_argument("other", nargs="?", type=Path, metavar="OTHER", help="a second run, to compare")
        parser.add_argument(
            "--metric", action="append", default=[], metavar="NAME", help="show this metric; may be given several times"
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_runtime.report.run_record import RunRecord

        from rlhf_cli.runs.curves import History
        from rlhf_cli.runs.output import terminal
        from rlhf_cli.runs.run_text import print_comparison, print_run

        record, history = RunRecord.read(args.run_folder), History.read(args.run_folder)
        if args.other is None:
            history.check(args.metric, args.run_folder)
            print_run(terminal(), record, history, args.metric)
            return 0
        if args.other.resolve() == args.run_folder.resolve():
            raise ConfigError(f"{args.run_folder} and {args.other} are the same run. Name two runs, or only one.")
        other, other_history = RunRecord.read(args.other), History.read(args.other)
        history.check([name for name in args.metric if name not in other_history.names], args.run_folder)
        print_comparison(terminal(), (record, other), (history, other_history), args.metric)
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [ShowCommand]
