"""Flags of the run file on a command line: short flags, and a dotted flag for every field.

A command imports this file to build its parser, so this file imports nothing of the run file: ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from rlhf.errors import ConfigError

SHORT_FLAGS: Mapping[str, str] = {
    "algo": "algorithm.use",
    "reward": "reward",
    "model": "policy.model",
    "data": "data.train",
    "eval-data": "data.eval",
    "backend": "backend",
    "output": "run.output",
    "seed": "run.seed",
    "resume": "run.resume",
    "overwrite": "run.overwrite",
    "steps": "run.steps",
}
"""{short flag without dashes: dotted path, as in the overrides of :func:`rlhf_runtime.config.load.load`}."""
HELP = {
    "algo": "algorithm plugin",
    "reward": "reward: plugin:NAME, file:PATH.py, python:MODULE:NAME, model:PATH; may be given several times",
    "model": "model to train: a folder or a hub name",
    "data": "training data: a file, a folder or a hub name; may be given several times",
    "eval-data": "held-out data; may be given several times",
    "backend": "launcher, trainer and generator under one name",
    "output": "run directory",
    "seed": "seed of all random choices",
    "steps": "number of steps of the run",
    "resume": "continue from the newest checkpoint in the run directory",
    "overwrite": "delete the run in the run directory",
}
EVERY_FLAG = "Every option of a run file is a flag, such as --trainer.lr 1e-5; `rlhf explain` says what each means."
REPEATABLE_FLAGS = ("reward", "data", "eval-data")
"""Short flags that may be given several times."""


def add_run_file(
    parser: argparse.ArgumentParser, excluded_flags: Sequence[str] = (), meanings: Mapping[str, str] | None = None
) -> None:
    """Add ``RUN.TOML`` and the short flags.

    Args:
        excluded_flags: short flags that the command does not have, without dashes.
        meanings: {short flag: help} for flags with another meaning in the command.
    """
    parser.add_argument("run_file", nargs="?", metavar="RUN.TOML", help="run file; flags override its values")
    add_short_flags(parser, excluded_flags, meanings)
    parser.epilog = f"{EVERY_FLAG} {parser.epilog or ''}".strip()


def add_short_flags(
    parser: argparse.ArgumentParser, excluded_flags: Sequence[str] = (), meanings: Mapping[str, str] | None = None
) -> None:
    """Add :data:`SHORT_FLAGS`, except ``excluded_flags``."""
    texts = {**HELP, **(meanings or {})}
    for name in SHORT_FLAGS:
        if name in excluded_flags:
            continue
        if name in ("resume", "overwrite"):
            parser.add_argument(f"--{name}", action="store_true", help=texts[name])
        else:
            action = "append" if name in REPEATABLE_FLAGS else "store"
            parser.add_argument(f"--{name}", action=action, metavar=name.upper(), help=texts[name])


def overrides(args: argparse.Namespace, renamed: Mapping[str, str] | None = None) -> list[tuple[str, str | None]]:
    """(dotted path, text) of every short and dotted flag in ``args``; None for a flag without a value.

    Args:
        renamed: {short flag: dotted path} for flags that have another meaning in the command.

    Raises ConfigError if an option is set by its short and by its dotted flag: the parser does not tell which is later.
    """
    targets = {**SHORT_FLAGS, **(renamed or {})}
    flags: list[tuple[str, str | None]] = []
    dotted_flags = dotted(args.overrides)
    for name, target in targets.items():
        value = getattr(args, name.replace("-", "_"), None)
        if value is None or value is False:
            continue
        if any(path == target for path, _ in dotted_flags):
            raise ConfigError(f"--{name} and --{target} set the same option: remove one of them")
        texts = value if isinstance(value, list) else ["true" if value is True else value]
        flags += [(target, text) for text in texts]
    return flags + dotted_flags


def dotted(words: Sequence[str]) -> list[tuple[str, str | None]]:
    """``["--a.b", "1", "--c.d=2", "--e"]`` as pairs."""
    flags: list[tuple[str, str | None]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise ConfigError(
                f"unexpected argument {word!r}; fields of the run file are flags: --run.seed 3. A flag takes one "
                "value: --data a.jsonl --data b.jsonl"
            )
        key, equals, text = word[2:].partition("=")
        value = text if equals else rest.pop(0) if rest and not rest[0].startswith("--") else None
        flags.append((key, value))
    return flags
