"""Fields of TRL's trainers from a command line, or from a file in YAML or JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

from rlhf_cli.migrate.rows import FrameworkOptions, OptionValue, rows_of, table, typed, value_of
from rlhf_cli.migrate.shell import Word, known_flag, words_by_flag
from rlhf_cli.migrate.trl import GROUPS, NAME

CONFIGS = {f"{name}Config": name.lower() for name in ("GRPO", "RLOO", "SFT", "DPO", "Reward", "KTO")}
"""{class of TRL: trainer}."""
TRAINERS = {f"{name}Trainer": name.lower() for name in ("GRPO", "RLOO", "SFT", "DPO", "Reward", "KTO")}
LAUNCHER = (
    *("num_processes", "num_machines", "accelerate_config", "config_file", "machine_rank", "main_process_ip"),
    *("main_process_port", "mixed_precision", "gpu_ids", "multi_gpu", "use_deepspeed", "use_fsdp", "env"),
)
"""Options of ``accelerate launch`` that ``trl NAME`` passes on, and the variables that its file sets."""


def flags_of(words: Sequence[Word], script: str, source: FrameworkOptions) -> dict[str, tuple[list[str], str, int]]:
    """{name of a flag: its texts, the flag as it was given, its line}. What cannot be read is a problem of `source`."""
    flags = dict[str, tuple[list[str], str, int]]()
    for word, values in words_by_flag(words):
        with source.reading():
            flag, texts = known_flag(word, values, script)
            form = word.text if "=" in word.text else " ".join([flag, *texts])
            flags[flag.removeprefix("--").replace("-", "_")] = texts, form, word.line
    return flags


def of_command(entry: str, words: Sequence[Word], script: str) -> tuple[FrameworkOptions, dict[str, str]]:
    """From ``trl grpo --flag value ...``: the fields, and the options of the launcher.

    ``--config FILE`` is read too; flags have precedence."""
    source = fields_of(entry)
    options, launcher, files = dict[str, OptionValue](), dict[str, str](), dict[str, str]()
    for name, (values, form, line) in flags_of(words, script, source).items():
        location = f"{script}, line {line}"
        if name == "config" and len(values) == 1:
            files |= _take(source, _mapping(values[0]), values[0])
            continue
        if name in LAUNCHER:
            launcher[name] = " ".join(values)
            continue
        if name.startswith("no_") and name not in source.rows:  # of a switch that is on by default
            name, values = name.removeprefix("no_"), ["false"]
        with source.reading():
            for row in source.matching(name, form, location):
                label = f"--{name} ..." if row.secret else form
                options[row.name] = OptionValue(value_of(row, values, location), label, location)
    source.user_values |= options
    return source, files | launcher


def of_mapping_file(path: str) -> tuple[FrameworkOptions, dict[str, str]]:
    """From a configuration in YAML or JSON, whose fields say which trainer it is for; also its launcher's options.

    Where several trainers have as many of its fields, the path says which."""
    fields = _mapping(path)
    names = [name for name in fields if name not in LAUNCHER]
    unknown = dict[str, list[str]]()
    for entry in GROUPS:
        names_of_rows = {other for row in fields_of(entry).rows.values() for other in (row.name, *row.old)}
        unknown[entry] = [name for name in names if name not in names_of_rows]
    fewest = min(map(len, unknown.values()))
    fitting = [entry for entry in GROUPS if len(unknown[entry]) == fewest]
    for text in (Path(path).name, path):  # what it is called, where its fields do not say it
        candidates = [entry for entry in GROUPS if re.search(entry, text.lower())]
        fitting = candidates if len(candidates) == 1 else [entry for entry in fitting if entry in candidates] or fitting
        if len(fitting) == 1:
            break
    if len(fitting) != 1 or len(unknown[fitting[0]]) * 2 > len(names):
        means = f"its fields fit {', '.join(fitting)}" if fewest * 2 <= len(names) else "its fields fit no trainer"
        raise ConfigError(f'{path}: {means}. Say which one it is for: rlhf migrate trl "trl NAME --config {path}"')
    source = fields_of(fitting[0])
    return source, _take(source, fields, Path(path).name)


def processes_of_config(config: str) -> int | None:
    """The processes that a configuration of ``accelerate`` starts, or one that TRL has under a name.

    Raises ConfigError where the file is not here."""
    if config in ("zero1", "zero2", "zero3", "fsdp1", "fsdp2", "multi_gpu", "single_gpu"):
        return 1 if config == "single_gpu" else 8
    fields = _mapping(config)
    count = 1 if fields.get("distributed_type") in ("NO", False) else fields.get("num_processes")
    return count if isinstance(count, int) else None


def fields_of(entry: str) -> FrameworkOptions:
    groups = table("trl")
    return FrameworkOptions(NAME, groups, rows_of(groups, GROUPS[entry]), entry)


def give(source: FrameworkOptions, name: str, value: Any, text: str, location: str) -> None:
    """Keep a value of YAML or Python."""
    for row in source.matching(name, text, location):
        label = f"{name}: ..." if row.secret else text
        source.user_values[row.name] = OptionValue(typed(row, value, location), label, location)


def _take(source: FrameworkOptions, fields: Mapping[str, Any], location: str) -> dict[str, str]:
    """Keep the fields of a file; those of the launcher."""
    for name, value in fields.items():
        if name not in LAUNCHER:
            with source.reading():
                give(source, name, value, f"{name}: {value}", location)
    return {name: str(value) for name, value in fields.items() if name in LAUNCHER}


def _mapping(path: str) -> dict[str, Any]:
    """The fields of a file in YAML or JSON."""
    import yaml

    try:
        fields = yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} should hold fields with values, got {type(fields).__name__}")
    return {str(name): value for name, value in fields.items()}


def is_file_of_fields(source: str) -> bool:
    """Whether a source is a file in YAML or JSON."""
    return os.path.isfile(source) and Path(source).suffix in (".yaml", ".yml", ".json")
