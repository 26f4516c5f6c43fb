"""Show rows as the model will see them, and turn recorded samples into data.

An action is a module of this package, ``data_ACTION``, imported only when it is called; it has what a command's module
has, and its docstring's first line is its help.
"""

from __future__ import annotations

import argparse
import importlib

from rlhf.errors import ConfigError, did_you_mean

ACTIONS = {
    "preview": "rows as the model will see them: tokens, what is trained on, what is left out and why",
    "export": "recorded samples as data: pairs, best of n, labels, demonstrations, scored and conditional rows",
}
"""Name -> help; here, so that help imports none of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} ACTION ..."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, ACTIONS))
    parser.description = (parser.description or "") + "\n\nactions:\n" + "\n".join(
        f"  {name.ljust(width)}  {text}" for name, text in ACTIONS.items()
    )  # fmt: skip
    parser.add_argument("action", metavar="ACTION", help=f"one of {', '.join(ACTIONS)}; `ACTION --help` explains it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from rlhf_cli.main import call

    if args.action not in ACTIONS:
        known = ", ".join(ACTIONS)
        raise ConfigError(f"no action {args.action!r}; actions are {known}.{did_you_mean(args.action, ACTIONS)}")
    action = importlib.import_module(f"rlhf_cli.data_{args.action}")
    return call(f"rlhf data {args.action}", action, args.arguments)
