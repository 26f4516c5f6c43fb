"""Write a run file from the command line or the configuration of another framework."""

from __future__ import annotations

import argparse

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command

from rlhf_cli.command_output import add_written_run_file, require_new_file, write_run_file

FRAMEWORKS = ("openrlhf", "trl", "verl")


class MigrateCommand(Command):
    """Translate a command of another framework into a run file: `rlhf migrate openrlhf train.sh`.

    The source is a shell script or a whole command in quotes; for trl also a configuration or a Python script. Nothing
    of it is executed. Each value of the file has a comment with the option that it comes from. At the end are the
    options that are defaults here too, and those without a counterpart, with the reason. An option that is unknown, and
    a value that means nothing here, are errors.
    """

    name = "migrate"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("framework", choices=FRAMEWORKS, help="framework of the source")
        parser.add_argument("source", metavar="SOURCE", help="a file, or a command in quotes")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="value of a variable that the source does not set, or of an option to override; may be given several "
            "times",
        )
        unknown = "list unknown options in the file, as remaining work, instead of refusing them"
        parser.add_argument("--allow-unknown", action="store_true", help=unknown)
        add_written_run_file(parser)

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.plugins import Plugins

        from rlhf_cli.migrate.find import migrate

        if args.file is not None:
            require_new_file(args.file, args.force)
        settings = dict(self._pair(text) for text in args.set)
        text = migrate(args.framework, args.source, settings, Plugins.discover(), allow_unknown=args.allow_unknown)
        write_run_file(args.file, text)
        return 0

    def _pair(self, text: str) -> tuple[str, str]:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: should be NAME=VALUE")
        return name, value


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [MigrateCommand]
