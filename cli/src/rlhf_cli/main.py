"""The command ``rlhf``. A command is a module of this package, imported only when it is called.

Such a module has ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code), and its docstring's first line is
its help. Where it sets ``OVERRIDES = True``, arguments that its parser does not know (``--algorithm.loss.clip_high
0.28``) are no error but come as ``args.overrides``, a list of strings.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from rlhf import __version__
from rlhf.errors import ConfigError, PluginConflict, PluginNotFound, RlhfError, did_you_mean

COMMANDS = {
    "train": "run an algorithm: rlhf train run.toml, or --algo NAME --model PATH --data FILE ...",
    "eval": "score a model's answers on data",
    "generate": "sample answers from a model",
    "score": "score answers that are given",
    "data": "show rows as the model will see them; make data of recorded samples",
    "plan": "show placement and memory, and whether a run fits",
    "plugins": "list, show, check and create plugins",
    "doctor": "check this installation, this machine, and what a run needs",
}
"""Name -> help; here, so that ``rlhf --help`` imports none of them."""

LIKE = 0.75
"""Least likeness of a flag to one of a command's own to be taken for it, misspelt. Others are names of the run file."""

USAGE_ERRORS = (ConfigError, PluginNotFound, PluginConflict)
"""Exit code 2, as for a wrong flag; other errors of this project are 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``rlhf``; returns the exit code: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # text of rows and models may hold what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    traceback = "--traceback" in words
    words = [w for w in words if w != "--traceback"]
    try:
        try:
            return _dispatch(words)
        finally:  # also after --help: what fails while Python shuts down is nobody's to catch
            sys.stdout.flush()
    except RlhfError as error:
        if traceback:
            raise
        sys.stderr.write(f"rlhf: {error}\n")
        return 2 if isinstance(error, USAGE_ERRORS) else 1
    except KeyboardInterrupt:
        if traceback:
            raise
        sys.stderr.write("rlhf: interrupted\n")
        return 130
    except BrokenPipeError:  # the reader left, as in ``rlhf plugins list | head -1``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(words: list[str]) -> int:
    parser = _top_parser()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if words[0].startswith("-"):
        parser.parse_args(words)  # --help and --version end here
        return 2
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise ConfigError(f"no command {name!r}; commands are {', '.join(COMMANDS)}.{did_you_mean(name, COMMANDS)}")
    return call(f"rlhf {name}", importlib.import_module(f"rlhf_cli.{name}"), rest)


def call(prog: str, command: Any, words: list[str]) -> int:
    """Parse a command's words and run it; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=(command.__doc__ or "").strip().split("\n\n")[0],
        epilog="--traceback shows where an error was raised",
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    if getattr(command, "OVERRIDES", False):
        words, dotted = split_dotted(words, [name for action in parser._actions for name in action.option_strings])
        args, unknown = parser.parse_known_args(words)
        args.overrides = dotted + unknown
    else:
        args = parser.parse_args(words)
    return int(command.run(args))


def split_dotted(words: Sequence[str], known: Sequence[str] | None = None) -> tuple[list[str], list[str]]:
    """(other words, flags of the run file with their values): argparse would take such a value for a positional one.

    Args:
        known: the command's own flags; every other one is taken for one of the run file. Those with a dot only, where
            absent.

    Raises ConfigError for a flag that is nearly one of ``known``.
    """
    others: list[str] = []
    dotted: list[str] = []
    rest = list(words)
    own = [name.removeprefix("--") for name in known or () if name.startswith("--")]
    while rest:
        word = rest.pop(0)
        flag = word.partition("=")[0]
        if not word.startswith("--") or flag in (known or ("--",)) or (known is None and "." not in flag):
            others.append(word)
            continue
        name = flag.removeprefix("--").replace("_", "-")
        near = [] if "." in flag else difflib.get_close_matches(name, own, n=1, cutoff=LIKE)
        if near:
            raise ConfigError(f"no flag {flag}. Did you mean --{near[0]}?")
        dotted.append(word)
        if "=" not in word and rest and not (rest[0].startswith("--") or rest[0] in (known or ())):
            dotted.append(rest.pop(0))
    return others, dotted


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="rlhf",
        usage="rlhf [--version] COMMAND ...",
        description="Post-train language models from feedback.",
        epilog="commands:\n"
        + "".join(f"  {name.ljust(width)}  {text}\n" for name, text in COMMANDS.items())
        + "\n`rlhf COMMAND --help` explains a command; --traceback shows where an error was raised.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rlhf {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
