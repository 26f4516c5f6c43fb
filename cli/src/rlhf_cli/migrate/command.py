"""Write a run file from the command line or the configuration of another framework."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf.paths import path_argument

FRAMEWORKS = ("openrlhf", "trl", "verl")


class MigrateCommand(Command):
    """Write a run file that does what a command of another framework does: `rlhf migrate openrlhf train.sh`.

    The source is a shell script or a whole command in quotes; for trl also a configuration or a Python script. Nothing
    of it is executed. Each value of the file has a comment with the option that it comes from. At the end are the
    options that are defaults here too, and those without a counterpart, with the reason. An option that is unknown, and
    a value that means nothing here, are errors.
    """

    name = "migrate"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("framework", choices=FRAMEWORKS, help="where the source comes from")
        parser.add_argument("source", metavar="SOURCE", help="a file, or a command in quotes")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="value of a variable that the source does not state, or of an option in place of the source's; may be "
            "given several times",
        )
        unknown = "list options that are unknown in the file, as work that stays to do, instead of refusing them"
        parser.add_argument("--allow-unknown", action="store_true", help=unknown)
        where = "file to write (default: standard output)"
        parser.add_argument("-o", "--output", dest="file", type=path_argument, metavar="RUN.TOML", help=where)
        parser.add_argument("--force", action="store_true", help="replace the file where it exists")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.errors import ConfigError
        from rlhf.plugins import Plugins
        from rlhf_runtime.checkpoint.atomic_files import write_atomic

        from rlhf_cli.migrate.find import migrate

        file: Path | None = args.file
        if file is not None and file.exists() and not args.force:
            raise ConfigError(f"{file} exists; --force replaces it")
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"there is no folder {file.parent} to write {file.name} into")
        settings: Mapping[str, str] = dict(self._pair(text) for text in args.set)
        text = migrate(args.framework, args.source, settings, Plugins.discover(), allow_unknown=args.allow_unknown)
        if file is None:
            sys.stdout.write(text)
        else:
            write_atomic(file, text)
            sys.stdout.write(f"wrote {file}; next: rlhf train {file} --dry-run\n")
        return 0

    def _pair(self, text: str) -> tuple[str, str]:
        from rlhf.errors import ConfigError

        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: should be NAME=VALUE")
        return name, value


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [MigrateCommand]
