"""Which command of a script, or of a line, starts the training; from there to the text of a run file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rlhf.errors import ConfigError
from rlhf.plugins import Plugins

from rlhf_cli.migrate import openrlhf, trl, trl_source, verl
from rlhf_cli.migrate.draft import Draft
from rlhf_cli.migrate.shell import Word, commands, known_text

FRAMEWORKS: Mapping[str, ModuleType] = {"openrlhf": openrlhf, "trl": trl, "verl": verl}


@dataclass(frozen=True)
class Start:
    """The command that starts the training."""

    entry: str
    before: Sequence[Word]
    """The words of the launcher, before the entry point."""
    options: Sequence[Word]
    line: int


def migrate(framework: str, source: str, settings: Mapping[str, str], plugins: Plugins) -> str:
    """The text of the run file.

    Args:
        source: path of a file, or a command.
        settings: values of variables, of ``--set``.
    """
    draft, origin = {"openrlhf": _openrlhf, "trl": _trl, "verl": _verl}[framework](source, settings)
    return draft.text(origin, plugins)


def _openrlhf(source: str, settings: Mapping[str, str]) -> tuple[Draft, str]:
    text, where = _text(source)
    start = _start(text, where, settings, openrlhf)
    draft = openrlhf.convert(openrlhf.read(start.entry, start.options, where))
    return draft, f"{start.entry} ({where}, line {start.line})"


def _verl(source: str, settings: Mapping[str, str]) -> tuple[Draft, str]:
    text, where = _text(source)
    start = _start(text, where, settings, verl)
    return verl.convert(verl.read(start.options, where)), f"{start.entry} ({where}, line {start.line})"


def _trl(source: str, settings: Mapping[str, str]) -> tuple[Draft, str]:
    processes = int(settings["processes"]) if settings.get("processes", "").isdecimal() else None
    if trl_source.is_file_of_fields(source):
        fields, launcher = trl_source.of_mapping_file(source)
        processes = processes or _processes(launcher, source) or 1
        return trl.convert(fields, processes), f"{fields.entry} ({Path(source).name})"
    if source.endswith(".py") and os.path.isfile(source):
        fields = trl_source.of_script(source, settings)
        return trl.convert(fields, processes or 1), f"{fields.entry} ({Path(source).name})"
    text, where = _text(source)
    start = _start(text, where, settings, trl)
    fields, launcher = trl_source.of_command(trl.trainer(start.entry), start.options, where)
    place = f"{where}, line {start.line}"
    processes = processes or _processes(_launcher(start.before, where) | launcher, place) or 1
    draft = trl.convert(fields, processes)
    if start.entry not in trl.GROUPS:
        draft.remarks.append(
            f"{start.entry}.py: only its flags are read; look for data, rewards and fields in its code"
        )
    return draft, f"{start.entry} ({place})"


def _launcher(words: Sequence[Word], where: str) -> dict[str, str]:
    """The options of a launcher that say how many processes it starts."""
    options = dict[str, str]()
    for number, word in enumerate(words):
        name, equals, _ = word.text.lstrip("-").replace("-", "_").partition("=")
        if name in ("num_processes", "nproc_per_node", "num_gpus", "nnodes", "config_file"):
            following = known_text(words[number + 1], where) if words[number + 1 :] else ""
            options[name] = word.text.partition("=")[2] if equals else following
    return options


def _processes(launcher: Mapping[str, str], where: str) -> int | None:
    """The processes that a launcher starts, if it says so; torchrun counts those of one machine."""
    counts = {n: launcher[n] for n in ("num_processes", "nproc_per_node", "num_gpus", "nnodes") if n in launcher}
    for name, value in counts.items():
        if not value.isdecimal():
            raise ConfigError(f"{where}: {name} takes a number, got {value!r}. Give it: --set processes=N")
    numbers = {name: int(value) for name, value in counts.items()}
    nodes = numbers.pop("nnodes", 1)
    if numbers:
        return numbers.get("num_processes") or next(count * nodes for count in numbers.values())
    config = launcher.get("config_file") or launcher.get("accelerate_config")
    if not config:
        return None
    try:
        return trl_source.processes_of_config(config)
    except ConfigError as error:
        raise ConfigError(
            f"{where}: it says how many processes are started, but {error}. Give --set processes=N"
        ) from None


def _text(source: str) -> tuple[str, str]:
    """The text of a file, or of the command itself, and its name."""
    if re.search(r"\s", source) and not os.path.isfile(source):
        return source, "the command"
    try:
        return Path(source).read_text(encoding="utf-8"), Path(source).name
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}. Give a file, or a whole command in quotes") from None


def _start(text: str, where: str, settings: Mapping[str, str], framework: ModuleType) -> Start:
    starts = list(_starts(text, where, settings, framework.ENTRY, 0))
    if len(starts) == 1:
        return starts[0]
    if not starts:
        raise ConfigError(f"{where}: no command starts a training (a word like {framework.EXAMPLE})")
    lines = ", ".join(f"{start.entry} in line {start.line}" for start in starts)
    raise ConfigError(f"{where} starts {len(starts)} trainings: {lines}. Give the command of one in quotes")


def _starts(text: str, where: str, settings: Mapping[str, str], entry: re.Pattern[str], above: int) -> Iterator[Start]:
    """All such commands; also one in a text that is passed to another shell (``bash -c "..."``)."""
    for words in commands(text, where, settings):
        words = [Word(word.text, word.line + above) for word in words]
        for number, word in enumerate(words):
            if match := entry.fullmatch(word.text):
                yield Start(match[1], words[:number], words[number + 1 :], word.line)
                break
            if re.search(r"\s", word.text) and any(entry.fullmatch(w) for w in word.text.split()):
                yield from _starts(word.text, where, settings, entry, word.line - 1)
                break
