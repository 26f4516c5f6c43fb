"""Write a run file to start from: the options that matter first, each with its meaning."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf.paths import path_argument
from rlhf_runtime.config.command_line import add_short_flags, overrides


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
        where = "file to write (default: standard output)"
        parser.add_argument("-o", "--output", dest="file", type=path_argument, metavar="RUN.TOML", help=where)
        parser.add_argument("--force", action="store_true", help="replace the file where it exists")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.errors import ConfigError
        from rlhf.plugins import Plugins
        from rlhf_runtime.checkpoint.atomic_files import write_atomic
        from rlhf_runtime.config.load import load

        from rlhf_cli.options.run_file import run_file

        file: Path | None = args.file
        if file is not None and file.is_dir():
            raise ConfigError(f"--output {file} is a folder. Name a file in a folder that exists.")
        if file is not None and file.exists() and not args.force:
            raise ConfigError(f"{file} exists; --force replaces it")
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"there is no folder {file.parent} to write {file.name} into")
        flags = overrides(args) + ([("env", args.env)] if args.env is not None else [])
        text = run_file(load(None, flags), Plugins.discover(), str(file or "run.toml"))
        if file is None:
            sys.stdout.write(text)
        else:
            write_atomic(file, text)
            sys.stdout.write(f"wrote {file}; next: rlhf train {file} --dry-run\n")
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [InitCommand]
