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

from rlhf_cli.migrate import openrlhf, trl, trl_script, trl_source, verl
from rlhf_cli.migrate.rows import FrameworkOptions
from rlhf_cli.migrate.shell import Word, commands, known_text
from rlhf_cli.migrate.shell_branches import UNKNOWN

FRAMEWORKS: Mapping[str, ModuleType] = {"openrlhf": openrlhf, "trl": trl, "verl": verl}
OWN_ARGUMENTS = tuple(f"{UNKNOWN}{sign}{UNKNOWN}" for sign in "@*")
"""``"$@"``: what the script itself is started with, which is nothing here."""
SCRIPT = re.compile(r"(.+\.py)")


@dataclass(frozen=True)
class Start:
    """The command that starts the training."""

    entry: str
    word: str
    """The word that has it: a module, a script or a name."""
    launcher_words: Sequence[Word]
    """The words of the launcher, before the entry point."""
    options: Sequence[Word]
    line: int


class Settings(dict[str, str]):
    """Values of ``--set``, and the names of those that were read: the others are options."""

    def __init__(self, values: Mapping[str, str]) -> None:
        super().__init__(values)
        self.read_names = set[str]()

    def __contains__(self, name: object) -> bool:
        self.read_names.add(str(name))
        return super().__contains__(name)


def migrate(
    framework: str, source: str, settings: Mapping[str, str], plugins: Plugins, *, allow_unknown: bool = False
) -> str:
    """The text of the run file.

    Args:
        source: path of a file, or a command.
        settings: values of variables and options, of ``--set``.
        allow_unknown: whether options that are unknown are listed in the file, instead of refused.
    """
    read_settings = Settings(settings)
    fields, origin, processes = {"openrlhf": _openrlhf, "trl": _trl, "verl": _verl}[framework](source, read_settings)
    options = {name: value for name, value in settings.items() if name not in read_settings.read_names}
    fields.replace(options)
    for name in options:
        fields.unknown.pop(name, None)
    fields.check(allow_unknown)
    draft = trl.convert(fields, processes) if framework == "trl" else FRAMEWORKS[framework].convert(fields)
    return draft.text(origin, plugins)


def _openrlhf(source: str, settings: Mapping[str, str]) -> tuple[FrameworkOptions, str, int]:
    text, script = _text(source)
    start = _start(text, script, settings, openrlhf)
    return openrlhf.read(start.entry, start.options, script), f"{start.entry} ({script}, line {start.line})", 1


def _verl(source: str, settings: Mapping[str, str]) -> tuple[FrameworkOptions, str, int]:
    text, script = _text(source)
    start = _start(text, script, settings, verl)
    fields = verl.read(start.options, script)
    if not verl.OWN_ENTRY.fullmatch(start.word):
        fields.remarks.append(f"{start.word} is not verl's own: only its keys are read; look for more in its code")
    return fields, f"{start.entry} ({script}, line {start.line})", 1


def _trl(source: str, settings: Mapping[str, str]) -> tuple[FrameworkOptions, str, int]:
    processes = int(settings["processes"]) if "processes" in settings and settings["processes"].isdecimal() else None
    if trl_source.is_file_of_fields(source):
        fields, launcher = trl_source.of_mapping_file(source)
        return fields, f"{fields.entry} ({Path(source).name})", processes or _processes(launcher, source) or 1
    if source.endswith((".py", ".ipynb")) and os.path.isfile(source):
        fields = trl_script.of_script(source, settings)
        return fields, f"{fields.entry} ({Path(source).name})", processes or 1
    text, script = _text(source)
    start = _start(text, script, settings, trl)
    place, name = f"{script}, line {start.line}", Path(start.word).stem
    is_file = start.word.endswith(".py") and os.path.isfile(start.word)
    launcher = _launcher(start.launcher_words, script)
    if is_file and trl_script.is_script(start.word):
        problems = FrameworkOptions("", {}, {}, "")
        flags = trl_source.flags_of(start.options, script, problems)
        fields = trl_script.of_script(start.word, settings, {flag: texts for flag, (texts, *_) in flags.items()})
        fields.problems += problems.problems
        return fields, f"{name} ({place})", processes or _processes(launcher, place) or 1
    trainer = (trl_script.trainer_of_parser(start.word) if is_file else None) or trl.trainer(start.entry)
    if trainer not in trl.GROUPS:
        raise ConfigError(
            f"{place}: {start.word} is not called like one of TRL's trainers, and has no configuration of one"
        )
    fields, config = trl_source.of_command(trainer, start.options, script)
    if start.word.endswith(".py") and not start.word.endswith(f"trl/scripts/{name}.py"):
        fields.remarks.append(f"{name}.py: only its flags are read; look for data, rewards and fields in its code")
    return fields, f"{name} ({place})", processes or _processes(launcher | config, place) or 1


def _launcher(words: Sequence[Word], script: str) -> dict[str, str]:
    """The options of a launcher that say how many processes it starts."""
    options = dict[str, str]()
    for number, word in enumerate(words):
        name, equals, _ = word.text.lstrip("-").replace("-", "_").partition("=")
        if name in ("num_processes", "nproc_per_node", "num_gpus", "nnodes", "config_file"):
            following = known_text(words[number + 1], script) if words[number + 1 :] else ""
            options[name] = word.text.partition("=")[2] if equals else following
    return options


def _processes(launcher: Mapping[str, str], script: str) -> int | None:
    """The processes that a launcher starts, if it says so; torchrun counts those of one machine."""
    counts = {n: launcher[n] for n in ("num_processes", "nproc_per_node", "num_gpus", "nnodes") if n in launcher}
    for name, value in counts.items():
        if not value.isdecimal():
            raise ConfigError(f"{script}: {name} takes a number, got {value!r}. Give it: --set processes=N")
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
            f"{script}: it says how many processes are started, but {error}. Give --set processes=N"
        ) from None


def _text(source: str) -> tuple[str, str]:
    """The text of a file, or of the command itself, and its name."""
    if re.search(r"\s", source) and not os.path.isfile(source):
        return source, "the command"
    try:
        return Path(source).read_text(encoding="utf-8"), Path(source).name
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}. Give a file, or a whole command in quotes") from None


def _start(text: str, script: str, settings: Mapping[str, str], framework: ModuleType) -> Start:
    starts = list(_starts(text, script, settings, framework.ENTRY, 0))
    if framework is openrlhf:
        starts = [start for start in starts if start.entry in openrlhf.ENTRIES] or starts
    if framework is trl and not starts:
        starts = [start for start in _starts(text, script, settings, SCRIPT, 0) if _makes_trainer(start.word)]
    if "line" in settings:
        starts = [start for start in starts if str(start.line) == settings["line"]]
    if len(starts) == 1:
        return starts[0]
    if not starts:
        scripts = {start.word for start in _starts(text, script, settings, SCRIPT, 0) if not os.path.isfile(start.word)}
        absent = f"; {', '.join(sorted(scripts))} cannot be read from this folder" if scripts else ""
        raise ConfigError(f"{script}: no command starts a training (a word like {framework.EXAMPLE}){absent}")
    lines = ", ".join(f"{start.entry} in line {start.line}" for start in starts)
    raise ConfigError(f"{script} starts {len(starts)} trainings: {lines}. Choose one: --set line=N")


def _makes_trainer(script: str) -> bool:
    if not os.path.isfile(script):
        return False
    return trl_script.is_script(script) or trl_script.trainer_of_parser(script) is not None


def _starts(
    text: str, script: str, settings: Mapping[str, str], entry: re.Pattern[str], first_line: int
) -> Iterator[Start]:
    """All such commands; also one in a text that is passed to another shell (``bash -c "..."``)."""
    for words in commands(text, script, settings):
        words = [Word(word.text, word.line + first_line) for word in words]
        for number, word in enumerate(words):
            match = entry.fullmatch(word.text)
            if match and entry is trl.ENTRY and not match[0].endswith(".py") and "trl" not in match[0]:
                match = match if number and words[number - 1].text.endswith("trl") else None  # `trl grpo`
            if match:
                options = [word for word in words[number + 1 :] if word.text not in OWN_ARGUMENTS]
                yield Start(match[match.lastindex or 1], word.text, words[:number], options, word.line)
                break
            if re.search(r"\s", word.text) and any(entry.fullmatch(w) for w in word.text.split()):
                yield from _starts(word.text, script, settings, entry, word.line - 1)
                break
