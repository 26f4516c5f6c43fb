"""Commands with actions: `rlhf data preview`, `rlhf plugins list`."""

from __future__ import annotations

import argparse
import inspect
from typing import ClassVar

from rlhf.errors import ConfigError, did_you_mean
from rlhf.interfaces import Command

from rlhf_cli.main import run_command


class CommandGroup(Command):
    """A command whose first word names an action. The action is a command, which gets the remaining words."""

    actions: ClassVar[tuple[type[Command], ...]]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.usage = f"{parser.prog} ACTION ..."
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        width = max(len(action.name) for action in self.actions)
        lines = [f"  {action.name.ljust(width)}  {first_line(action)}" for action in self.actions]
        parser.description = "\n".join([parser.description or "", "", "actions:", *lines])
        names = ", ".join(action.name for action in self.actions)
        parser.add_argument("action", metavar="ACTION", help=f"one of {names}; `ACTION --help` explains it")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def run(self, args: argparse.Namespace) -> int:
        actions = {action.name: action for action in self.actions}
        if args.action not in actions:
            names, hint = ", ".join(actions), did_you_mean(args.action, actions)
            raise ConfigError(f"unknown action {args.action!r}; allowed actions: {names}.{hint}")
        return run_command(f"rlhf {self.name} {args.action}", actions[args.action](), args.arguments)


def first_line(command: type[Command]) -> str:
    """The first line of a command's docstring."""
    return (inspect.getdoc(command) or "").partition("\n")[0]
