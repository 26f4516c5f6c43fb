"""Which command of a script, or of a line, starts the training; from there to the text of a run file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf.errors import ConfigError
from rlhf.plugins import Plugins

from rlhf_cli.migrate import openrlhf
from rlhf_cli.migrate.shell import Word, commands

FRAMEWORKS = {"openrlhf": openrlhf}


@dataclass(frozen=True)
class Start:
    """The command that starts the training."""

    entry: str
    before: Sequence[Word]
    """The words of the launcher, before the entry point."""
    options: Sequence[Word]
    line: int


def migrate(framework: str, source: str, known: Mapping[str, str], plugins: Plugins) -> str:
    """The text of the run file.

    Args:
        source: path of a file, or a command.
        known: values of variables, of ``--set``.
    """
    text, where = _text(source)
    start = _start(text, where, known, openrlhf.ENTRY)
    draft = openrlhf.convert(openrlhf.read(start.entry, start.options, where))
    return draft.text(f"{start.entry} ({where}, line {start.line})", plugins)


def _text(source: str) -> tuple[str, str]:
    """The text of a file, or of the command itself, and its name."""
    if re.search(r"\s", source) and not os.path.isfile(source):
        return source, "the command"
    try:
        return Path(source).read_text(encoding="utf-8"), Path(source).name
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}. Give a file, or a whole command in quotes") from None


def _start(text: str, where: str, known: Mapping[str, str], entry: re.Pattern[str]) -> Start:
    starts = list(_starts(text, where, known, entry, 0))
    if len(starts) == 1:
        return starts[0]
    if not starts:
        raise ConfigError(f"{where}: no command starts a training (a word like openrlhf.cli.train_ppo_ray)")
    lines = ", ".join(f"{start.entry} in line {start.line}" for start in starts)
    raise ConfigError(f"{where} starts {len(starts)} trainings: {lines}. Give the command of one in quotes")


def _starts(text: str, where: str, known: Mapping[str, str], entry: re.Pattern[str], above: int) -> Iterator[Start]:
    """All such commands; also one in a text that is passed to another shell (``bash -c "..."``)."""
    for words in commands(text, where, known):
        words = [Word(word.text, word.line + above) for word in words]
        for number, word in enumerate(words):
            if match := entry.fullmatch(word.text):
                yield Start(match[1], words[:number], words[number + 1 :], word.line)
                break
            if re.search(r"\s", word.text) and any(entry.fullmatch(w) for w in word.text.split()):
                yield from _starts(word.text, where, known, entry, word.line - 1)
                break
