"""The program ``rlhf``: a parser. Every subcommand is a plugin of kind ``command``, imported when it is called."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
import inspect
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rlhf import __version__
from rlhf.errors import (
    ConfigError,
    IntendedExit,
    PluginConflict,
    PluginError,
    PluginNotFound,
    RlhfError,
    brief,
    did_you_mean,
)
from rlhf.plugins import Entry, Plugins
from rlhf.plugins.registration import first_cause
from rlhf.proxies import exempt_loopback

if TYPE_CHECKING:
    from rlhf.interfaces import Command

USAGE_ERRORS = (ConfigError, PluginNotFound, PluginConflict)
"""Errors with exit code 2, as for a wrong flag. Other errors of this project have exit code 1."""
LIKE = 0.75
"""Smallest similarity at which an unknown flag is treated as a misspelled flag of the command. Below it, the flag is
treated as a name of the run file."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``rlhf``; returns the exit code: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters of rows and models
        sys.stdout.reconfigure(errors="backslashreplace")
    traceback = "--traceback" in words
    words = [w for w in words if w != "--traceback"]
    exempt_loopback()
    try:
        try:
            return _dispatch(words)
        finally:  # also after --help: an error of flushing cannot be caught while Python shuts down
            sys.stdout.flush()
    except RlhfError as error:
        if traceback:
            raise
        from rlhf_runtime.observe.sample_lines import printable  # --help starts without the runtime

        sys.stderr.write(printable(f"rlhf: {error}\n"))  # it may quote a row or a model
        return 2 if isinstance(error, USAGE_ERRORS) else 1
    except KeyboardInterrupt:
        if traceback:
            raise
        sys.stderr.write("rlhf: interrupted\n")
        return 130
    except BrokenPipeError:  # the reader closed the pipe, as in ``rlhf plugins list | head -1``
        _discard_output()
        return 1
    except OSError as error:  # a full disk, or a folder without write access
        if traceback:
            raise
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()
        sys.stderr.write(f"rlhf: {type(error).__name__}: {error}. --traceback shows where it was raised\n")
        return 1


def _discard_output() -> None:
    """Python writes the rest of the output when it ends, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plugin_names(plugins: Plugins, kind: str | None) -> list[str]:
    """The names of the installed plugins of a kind, or of all, each once, from metadata."""
    return list(dict.fromkeys(entry.name for entry in plugins.list(kind)))


def command_names(plugins: Plugins) -> list[str]:
    """The installed commands as they are typed: ``serve-reward`` for the plugin ``serve_reward``."""
    return [typed(name) for name in plugin_names(plugins, "command")]


def typed(name: str) -> str:
    """The name of a command on a command line. Names of plugins have no dash."""
    return name.replace("_", "-")


def call(name: str, words: Sequence[str]) -> int:
    """Run the command ``name`` with these words; returns its exit code.

    Args:
        name: ``plan``, or ``rlhf-cli/plan`` if several distributions offer the name.

    Raises ConfigError if no command has the name, PluginError if it cannot be imported.
    """
    plugins = Plugins.discover()
    names = command_names(plugins)
    name = name if "/" in name else typed(name)
    if "/" not in name and name not in names:
        install = plugins.how_to_install(f"rlhf-plugin-{name.replace('_', '-')}")
        suggestion = _near_command(name, plugins)
        raise ConfigError(f"unknown command {name!r}; allowed commands: {', '.join(names)}.{suggestion}{install}")
    return run_command(f"rlhf {name}", load_command(plugins, name), words)


def _near_command(name: str, plugins: Plugins) -> str:
    """Suggestion for a name that no command has: an algorithm, a command that begins with it or is spelled similarly,
    or a command with this word in its help."""
    if name.replace("-", "_") in {entry.name for entry in plugins.list("algorithm")}:
        return f" {name!r} is an algorithm: rlhf train --algo {name.replace('-', '_')}."
    names = command_names(plugins)
    helped = [typed(e.name) for e in plugins.list("command") if re.search(rf"\b{re.escape(name)}", one_line_help(e))]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    matches = [n for n in names if n.startswith(f"{name}-")] or close or helped
    return f" Did you mean {matches[0]!r}?" if matches else did_you_mean(name, names)


def load_command(plugins: Plugins, name: str) -> Command:
    """The command with this name. Raises PluginError if it is not installed or cannot be imported."""
    command: Command = plugins.resolve("command", name if "/" in name else name.replace("-", "_")).cls()
    return command


class _Paragraphs(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(fill(paragraph, width, indent) for paragraph in text.split("\n\n"))


class _CommandParser(argparse.ArgumentParser):
    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        try:
            super().exit(status, message)
        except SystemExit as end:
            raise IntendedExit(end.code) from None


def run_command(prog: str, command: Command, words: Sequence[str]) -> int:
    """Parse a command's words and run it; returns its exit code."""
    parser = _CommandParser(
        prog=prog,
        description=inspect.cleandoc(type(command).__doc__ or ""),
        formatter_class=_Paragraphs,
        epilog="--traceback shows where an error was raised",
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    if command.run_file_flags:
        words, dotted = split_dotted(words, [name for action in parser._actions for name in action.option_strings])
        args, unknown = parser.parse_known_args(words)
        args.overrides = dotted + unknown
    else:
        args = parser.parse_args(words)
    try:
        code: object = command.run(args)
    # --help or a wrong flag of an action: the parser of the action has written its message.
    except IntendedExit:
        raise
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich ends the program if the reader closed the pipe
            raise end.__context__ from None
        raise PluginError(f"{prog} was ended by {first_cause(end)}. A plugin must raise an error instead") from end
    if not isinstance(code, int):
        raise PluginError(f"the command {prog!r} must return its exit code, an integer, got {brief(code)}")
    return code


def split_dotted(words: Sequence[str], own_flags: Sequence[str] | None = None) -> tuple[list[str], list[str]]:
    """(other words, flags of the run file with their values). argparse would treat such a value as a positional one.

    Args:
        own_flags: the command's own flags; every other flag is treated as a flag of the run file. None: only flags with
            a dot are.

    Raises ConfigError for a flag that is very similar to one of ``own_flags``.
    """
    other_words: list[str] = []
    dotted: list[str] = []
    rest = list(words)
    names = [name.removeprefix("--") for name in own_flags or () if name.startswith("--")]
    while rest:
        word = rest.pop(0)
        flag = word.partition("=")[0]
        if not word.startswith("--") or flag in (own_flags or ("--",)) or (own_flags is None and "." not in flag):
            other_words.append(word)
            continue
        name = flag.removeprefix("--").replace("_", "-")
        matches = [] if "." in flag else difflib.get_close_matches(name, names, n=1, cutoff=LIKE)
        if matches and not _of_another_framework(flag.removeprefix("--")):  # those are reported with all other problems
            raise ConfigError(f"no flag {flag}. Did you mean --{matches[0]}?")
        dotted.append(word)
        if "=" not in word and rest and not (rest[0].startswith("--") or rest[0] in (own_flags or ())):
            dotted.append(rest.pop(0))
    return other_words, dotted


def _of_another_framework(name: str) -> bool:
    from rlhf_runtime.config.other_frameworks import OTHER_NAMES  # --help starts without the runtime

    return name in OTHER_NAMES


def _dispatch(words: list[str]) -> int:
    if not words:
        _top_parser().print_help(sys.stderr)
        return 2
    if words[0] == "--version":
        sys.stdout.write(f"rlhf {__version__}\n")
        return 0
    if words[0].startswith("-"):
        _top_parser().parse_args(words)  # --help ends here
        return 2
    return call(words[0], words[1:])


def _top_parser() -> argparse.ArgumentParser:
    helps = {typed(entry.name): one_line_help(entry) for entry in Plugins.discover().list("command")}
    width = max(map(len, helps), default=0)
    parser = argparse.ArgumentParser(
        prog="rlhf",
        usage="rlhf [--version] COMMAND ...",
        description="Post-train language models from feedback.",
        epilog="commands:\n"
        + "".join(f"  {name.ljust(width)}  {text}\n" for name, text in helps.items())
        + "\n`rlhf COMMAND --help` explains a command; --traceback shows where an error was raised.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rlhf {__version__}")
    return parser


def one_line_help(entry: Entry) -> str:
    """The first line of the docstring of the module that the entry point names, without the full stop.

    If there is none: the distribution that offers the command, or why it cannot be used.
    """
    if entry.status != "ok":
        return f"({entry.owner}: {entry.status})"
    file = module_file(entry.module)
    try:
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) if file else None
    except (OSError, SyntaxError, ValueError) as error:
        return f"({entry.owner}: its module cannot be read: {error})"
    return docstring.splitlines()[0].rstrip(".") if docstring else f"({entry.owner})"


def module_file(module: str) -> Path | None:
    """The source file of a module, found without importing its package; None if there is none."""
    package, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not inner:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *inner)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None


if __name__ == "__main__":
    sys.exit(main())
