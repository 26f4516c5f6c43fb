"""The conformance suite of commands.

::

    from rlhf_testing.command import CommandContract

    class TestMyCommand(CommandContract):
        command = MyCommand
        calls = [(["--to", "Ada"], 0)]    # words of a command line, exit code
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from typing import Any

from rlhf_testing.contract import Nonconformance, PluginContract, expect, expect_light_import, missing

LONGEST = 100
"""Maximum characters of the line that ``rlhf --help`` shows."""


class CommandContract(PluginContract):
    """Checks what ``rlhf --help``, ``rlhf NAME --help`` and a call need."""

    kind = "command"
    command: Any = None
    calls: Sequence[tuple[Sequence[str], int]] = ()
    """(words after the command's name, exit code) of calls that may be made here."""

    def parser(self) -> argparse.ArgumentParser:
        """A parser with the command's own arguments, built as the program builds it."""
        parser = argparse.ArgumentParser(prog=f"rlhf {self.cls.name}", allow_abbrev=False)
        try:
            result = self.cls().add_arguments(parser)
        except Exception as error:
            raise Nonconformance(f"{self.label()} add_arguments() raised {type(error).__name__}: {error}") from error
        expect(result is None, f"{self.label()} add_arguments() returned {result!r}; it must return None")
        return parser

    def parsed(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments of a call."""
        parser = self.parser()
        try:
            if not self.cls.run_file_flags:
                return parser.parse_args(list(words))
            args: argparse.Namespace
            args, overrides = parser.parse_known_args(list(words))
        except SystemExit as error:
            raise Nonconformance(f"{self.label()} its parser refuses the words {list(words)} of `calls`") from error
        args.overrides = overrides
        return args

    # ------------------------------------------------------------------------------------- checks

    def test_arguments(self) -> None:
        """Its arguments can be added to a parser, and their help can be shown."""
        parser = self.parser()
        try:
            parser.format_help()
        except (ValueError, TypeError, KeyError) as error:
            raise Nonconformance(
                f"{self.label()} the help cannot be shown ({error}): write '%%' for a percent sign in a help text"
            ) from error
        flags = [name for action in parser._actions for name in action.option_strings]
        expect("--traceback" not in flags, f"{self.label()} adds --traceback, which `rlhf` itself defines")
        destinations = [action.dest for action in parser._actions]
        free = not (self.cls.run_file_flags and "overrides" in destinations)
        expect(free, f"{self.label()} adds an argument `overrides`: this name is reserved for flags of the run file")

    def test_line_of_help(self) -> None:
        """The module that the entry point names begins with a docstring, whose first line ``rlhf --help`` shows."""
        if not self.registered:
            return
        import importlib
        from importlib.metadata import entry_points

        package = self.cls.__module__.split(".")[0]
        points = [p for p in entry_points(group="rlhf.command", name=self.cls.name) if p.module.startswith(package)]
        for point in points:
            line = (importlib.import_module(point.module).__doc__ or "").split("\n")[0]
            expect(
                0 < len(line) <= LONGEST,
                f"{self.label()} the docstring of the module {point.module!r} begins with {line!r}; `rlhf --help` "
                f"shows this line: write 1 to {LONGEST} characters",
            )

    def test_import_is_light(self) -> None:
        """Importing the command's module imports no framework, because its help would take seconds. ``run`` imports
        what it needs."""
        if self.registered:
            expect_light_import(self.label(), self.cls.__module__, "move the import into run()")

    def test_calls(self) -> None:
        """A call returns its exit code, an integer."""
        if not self.calls:
            raise missing("calls = [(words after the command's name, exit code), ...] that can be run here")
        for words, code in self.calls:
            args = self.parsed(words)
            with contextlib.redirect_stdout(io.StringIO()):
                exit_code = self.cls().run(args)
            expect(
                type(exit_code) is int and exit_code == code,
                f"{self.label()} run() with {list(words)} returned {exit_code!r}, expected the exit code {code}",
            )
