"""Write a bash or zsh script that completes commands, flags, options and plugin names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property

from rlhf import hookimpl
from rlhf.errors import ConfigError, RlhfError
from rlhf.interfaces import Command
from rlhf.paths import path_argument
from rlhf.plugins import Plugins
from rlhf.plugins.entry import KINDS

from rlhf_cli.command_group import CommandGroup, first_line
from rlhf_cli.main import command_names, load_command, one_line_help, plugin_names, typed

SHELLS = ("bash", "zsh")
FLAG_KINDS = {"ALGO": "algorithm", "REWARD": "reward", "BACKEND": "backend", "ENV": "env"}
"""{name of a flag's value in the help: kind of the plugins that it may name}."""
PLACES = ("policy", "generator")
"""Names that ``--placement.NAME`` is completed with."""


class CompletionCommand(Command):
    """Write a completion script, which the shell then sources: `rlhf completion bash > FILE`.

    The script contains every command, flag, option of the run file and installed plugin, so that the shell completes
    words without starting Python. Write it again after installing plugins.
    """

    name = "completion"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("shell", choices=SHELLS, help="shell that reads the script")

    def run(self, args: argparse.Namespace) -> int:
        try:
            import shtab
        except ModuleNotFoundError:
            raise ConfigError("completion needs shtab, which is not installed. Try: pip install shtab") from None
        parser = whole_parser(Plugins.discover())
        for action in _actions(parser):
            if action.choices is None and _takes_path(action):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        sys.stdout.write(shtab.complete(parser, shell=args.shell) + "\n")
        return 0


def whole_parser(plugins: Plugins) -> argparse.ArgumentParser:
    """The parser of ``rlhf``, including the parsers of all commands. Commands that accept options of the run file have
    a flag for every option. A command that cannot be imported has no arguments."""
    words = _Words(plugins)
    top = argparse.ArgumentParser(prog="rlhf", allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="show the version")
    commands = top.add_subparsers()
    lines = {typed(entry.name): one_line_help(entry) for entry in plugins.list("command")}
    for name in command_names(plugins):
        parser = commands.add_parser(name, help=lines[name].replace("%", "%%"))
        try:
            command = load_command(plugins, name)
        except RlhfError:
            continue
        if isinstance(command, CommandGroup):
            actions = parser.add_subparsers()
            for action in command.actions:
                text = first_line(action).replace("%", "%%")
                words.fill(actions.add_parser(action.name, help=text), action())
        else:
            words.fill(parser, command)
    return top


class _Words:
    """The values that completion offers for arguments, from the installed plugins."""

    def __init__(self, plugins: Plugins) -> None:
        self._plugins = plugins

    def fill(self, parser: argparse.ArgumentParser, command: Command) -> None:
        """Set the completion values of each argument of a command's parser."""
        command.add_arguments(parser)
        for action in _actions(parser):
            metavar = str(action.metavar or action.dest.upper())
            if metavar in FLAG_KINDS:
                action.choices = plugin_names(self._plugins, FLAG_KINDS[metavar])
            elif metavar == "KIND":
                action.choices = KINDS
            elif metavar == "SECTION[.OPTION]":
                action.choices = self._sections()
            elif metavar == "NAME" and parser.prog.startswith("rlhf plugins "):
                action.choices = plugin_names(self._plugins, None)
        if command.run_file_flags:
            for path, (text, choices) in self._options.items():
                if f"--{path}" not in parser._option_string_actions:
                    parser.add_argument(f"--{path}", choices=choices or None, help=text)

    def _sections(self) -> list[str]:
        from rlhf_runtime.config.options import sections

        return [section.path for section in sections()] + list(self._options)

    @cached_property
    def _options(self) -> dict[str, tuple[str, Sequence[str]]]:
        """{dotted name: (first sentence of its meaning, its values if they are a fixed set)} for the options of the run
        file and of every plugin that a section may select. The values are those of all plugins that have the option. Of
        options below a name that the user chooses, only those of ``--placement`` are included."""
        from rlhf_runtime.config.options import plugin_options, run_file_options
        from rlhf_runtime.config.runfile import LISTS, SINGLE
        from rlhf_runtime.config.sections import Choice

        options = run_file_options()
        for entry in self._plugins.list():
            if entry.kind in SINGLE or entry.kind in LISTS:
                path = f"{entry.kind}.0" if entry.kind in LISTS else entry.kind
                choice = Choice(use=f"{entry.distribution}/{entry.name}")
                try:
                    options += plugin_options(self._plugins, entry.kind, path, choice, skip_broken=True)
                except RlhfError:
                    continue
        words: dict[str, tuple[str, Sequence[str]]] = {}
        for option in options:
            if option.type == "table" or ("NAME" in option.path and not option.path.startswith("placement.")):
                continue
            text = option.doc.partition(". ")[0].replace("%", "%%")
            values = plugin_names(self._plugins, option.kind) if option.kind else option.allowed
            for path in dict.fromkeys(option.path.replace("NAME", place) for place in PLACES):
                if path in words:  # of another plugin too
                    text, earlier = words[path]
                    values = tuple(dict.fromkeys((*earlier, *values))) if earlier and values else ()
                words[path] = text, values
        return words


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    """The arguments of a parser and of its subparsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action


def _takes_path(action: argparse.Action) -> bool:
    return (
        action.type is path_argument
        or not action.option_strings
        or action.dest in ("model", "data", "eval_data", "output")
    )


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [CompletionCommand]
