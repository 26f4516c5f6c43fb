"""Write a first run file with the most important options, each with its meaning."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf_runtime.config.command_line import add_short_flags, overrides

from rlhf_cli.command_output import add_written_run_file, require_new_file, write_run_file


class InitCommand(Command):
    """Write a run file: `rlhf init --algo NAME --reward NAME -o run.toml`.

    Options that the run needs and those that the flags give are written as values. Other options that matter first are
    written as comments with their defaults. Every flag of `rlhf train` can be given. A value that only you know gets a
    placeholder, which `rlhf train` refuses: with --model and --data the file can be used as it is.
    """

    name = "init"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_short_flags(parser, excluded_flags=("output", "resume", "overwrite"))
        parser.add_argument("--env", metavar="ENV", help="environment plugin")
        add_written_run_file(parser)

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.plugins import Plugins
        from rlhf_runtime.config.load import load

        from rlhf_cli.options.run_file import run_file

        file: Path | None = args.file
        if file is not None:
            require_new_file(file, args.force)
        flags = overrides(args) + ([("env", args.env)] if args.env is not None else [])
        write_run_file(file, run_file(load(None, flags), Plugins.discover(), str(file or "run.toml")))
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [InitCommand]
