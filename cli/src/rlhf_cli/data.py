"""Show rows as the model will see them; make data of recorded samples."""

from __future__ import annotations

import argparse
import importlib

from rlhf import hookimpl
from rlhf.errors import ConfigError, did_you_mean
from rlhf.interfaces import Command

from rlhf_cli.main import run_command

ACTIONS = {
    "preview": ("DataPreviewCommand", "rows as the model will see them: tokens, trained tokens, rows left out and why"),
    "export": (
        "DataExportCommand",
        "recorded samples as data: pairs, best of n, labels, demonstrations, scored and conditional rows",
    ),
}
"""{name: (class in the module ``rlhf_cli.data_NAME``, help)}. The module is imported when its action is called."""


class DataCommand(Command):
    """Show rows as the model will see them, and turn recorded samples into data."""

    name = "data"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = f"{parser.prog} ACTION ..."
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        width = max(map(len, ACTIONS))
        parser.description = (parser.description or "") + "\n\nactions:\n" + "\n".join(
            f"  {name.ljust(width)}  {text}" for name, (_, text) in ACTIONS.items()
        )  # fmt: skip
        names = ", ".join(ACTIONS)
        parser.add_argument("action", metavar="ACTION", help=f"one of {names}; `ACTION --help` explains it")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def run(self, args: argparse.Namespace) -> int:
        if args.action not in ACTIONS:
            actions = ", ".join(ACTIONS)
            raise ConfigError(f"no action {args.action!r}; actions are {actions}.{did_you_mean(args.action, ACTIONS)}")
        return run_command(f"rlhf data {args.action}", action_command(args.action), args.arguments)


def action_command(name: str) -> Command:
    """The command of one action; its module is imported."""
    command: Command = getattr(importlib.import_module(f"rlhf_cli.data_{name}"), ACTIONS[name][0])()
    return command


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [DataCommand]
