"""Finds the command of a script or a line that starts the training, and converts it to the text of a run file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

from rlhf.errors import ConfigError
from rlhf.plugins import Plugins

from rlhf_cli.migrate import openrlhf, trl, trl_script, trl_source, verl
from rlhf_cli.migrate.draft import Draft
from rlhf_cli.migrate.rows import FrameworkOptions
from rlhf_cli.migrate.shell import Start, Word, commands, flags, known_text
from rlhf_cli.migrate.shell_branches import UNKNOWN

FRAMEWORKS: Mapping[str, ModuleType] = {"openrlhf": openrlhf, "trl": trl, "verl": verl}
OWN_ARGUMENTS = tuple(f"{UNKNOWN}{sign}{UNKNOWN}" for sign in "@*")
"""``"$@"``: the arguments of the script itself, which are empty here."""
SCRIPT = re.compile(r"(.+\.py)")
COUNTS = ("num_processes", "nproc_per_node", "num_gpus", "nnodes")
"""Options of launchers that count processes or machines."""


class Settings(dict[str, str]):
    """Values of ``--set``, and the names of the values that were read. The others are options."""

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
        settings: values of variables and options, from ``--set``.
        allow_unknown: list unknown options in the file instead of refusing them.
    """
    read_settings, module = Settings(settings), FRAMEWORKS[framework]
    fields = _trl(source, read_settings) if framework == "trl" else module.read(_start(source, read_settings, module))
    fields.replace({name: value for name, value in settings.items() if name not in read_settings.read_names})
    fields.check(allow_unknown)
    fields.refuse_by_table()
    try:
        draft: Draft = module.convert(fields)
    except (TypeError, KeyError):
        # Some options may be null and others not, and the tables do not say which.
        nulls = [option.text for option in fields.user_values.values() if option.value is None]
        if not nulls:
            raise
        raise ConfigError(
            f"null cannot be converted for all of these options: {', '.join(nulls)}. Remove them, or give values: "
            "--set NAME=VALUE"
        ) from None
    return draft.text(plugins)


def _trl(source: str, settings: Mapping[str, str]) -> FrameworkOptions:
    """The fields of a configuration, of a script, or of a command."""
    launcher, location = dict[str, str](), Path(source).name
    if trl_source.is_file_of_fields(source):
        fields, launcher = trl_source.of_mapping_file(source)
    elif source.endswith((".py", ".ipynb")) and os.path.isfile(source):
        fields = trl_script.of_script(source, settings)
    else:
        start = _start(source, settings, trl)
        launcher, location = _launcher(start), start.location
        if start.word.endswith(".py") and trl_script.is_script(start.word):
            fields = _of_started_script(start, settings)
        else:
            fields, options = _of_trl_command(start)
            launcher |= options
        fields.origin = f"{Path(start.word).stem} ({location})"
    if "processes" in settings:
        launcher = {"num_processes": settings["processes"]}
    fields.processes = _processes(launcher, location) or 1
    return fields


def _of_started_script(start: Start, settings: Mapping[str, str]) -> FrameworkOptions:
    """The fields of a script that configures its trainer itself, perhaps from the flags of its command."""
    problems = list[str]()
    texts = {flag.name.replace("-", "_"): flag.texts for flag in flags(start.options, start.script, problems)}
    fields = trl_script.of_script(start.word, settings, texts)
    fields.problems += problems
    return fields


def _of_trl_command(start: Start) -> tuple[FrameworkOptions, dict[str, str]]:
    """The fields that are flags of a command, and the options of the launcher among them."""
    is_script = start.word.endswith(".py")
    trainer = trl_script.trainer_of_parser(start.word) if is_script and os.path.isfile(start.word) else None
    trainer = trainer or trl.trainer(start.entry)
    if trainer not in trl.GROUPS:
        raise ConfigError(
            f"{start.location}: {start.word} is not named like one of TRL's trainers, and has no configuration of one"
        )
    fields, launcher = trl_source.of_command(trainer, start.options, start.script)
    name = Path(start.word).stem
    if is_script and not start.word.endswith(f"trl/scripts/{name}.py"):
        fields.remarks.append(f"{name}.py: only its flags are read; check its code for data, rewards and fields")
    return fields, launcher


def _launcher(start: Start) -> dict[str, str]:
    """The options of a launcher that determine its number of processes."""
    options = dict[str, str]()
    for word, following in zip_longest(start.launcher_words, start.launcher_words[1:]):
        name, equals, text = word.text.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in (*COUNTS, "config_file"):
            options[name] = text if equals or following is None else known_text(following, start.script)
    return options


def _processes(launcher: Mapping[str, str], location: str) -> int | None:
    """The number of processes that a launcher starts, if it is stated. torchrun counts the processes of one machine."""
    numbers = dict[str, int]()
    for name in COUNTS:
        if name in launcher:
            if not launcher[name].isdecimal():
                raise ConfigError(
                    f"{location}: {name} takes a number, got {launcher[name]!r}. Give it: --set processes=N"
                )
            numbers[name] = int(launcher[name])
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
            f"{location}: the launcher sets the number of processes, but {error}. Give --set processes=N"
        ) from None


def _text(source: str) -> tuple[str, str]:
    """The text of a file, or of the command itself, and its name."""
    if re.search(r"\s", source) and not os.path.isfile(source):
        return source, "the command"
    try:
        return Path(source).read_text(encoding="utf-8"), Path(source).name
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}. Give a file, or a whole command in quotes") from None


def _start(source: str, settings: Mapping[str, str], framework: ModuleType) -> Start:
    text, script = _text(source)
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
        raise ConfigError(f"{script}: no command starts a training (expected a word like {framework.EXAMPLE}){absent}")
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
                yield Start(match[match.lastindex or 1], word.text, words[:number], options, script, word.line)
                break
            if re.search(r"\s", word.text) and any(entry.fullmatch(w) for w in word.text.split()):
                yield from _starts(word.text, script, settings, entry, word.line - 1)
                break
