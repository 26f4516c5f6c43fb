"""Fields of TRL's trainers from a command line, or from a file in YAML or JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

from rlhf_cli.migrate.rows import FrameworkOptions, rows_of, table, value_of
from rlhf_cli.migrate.shell import Word, flags
from rlhf_cli.migrate.trl import GROUPS, NAME

CONFIGS = {f"{name}Config": name.lower() for name in ("GRPO", "RLOO", "SFT", "DPO", "Reward", "KTO")}
"""{class of TRL: trainer}."""
TRAINERS = {f"{name}Trainer": name.lower() for name in ("GRPO", "RLOO", "SFT", "DPO", "Reward", "KTO")}
LAUNCHER = (
    *("num_processes", "num_machines", "accelerate_config", "config_file", "machine_rank", "main_process_ip"),
    *("main_process_port", "mixed_precision", "gpu_ids", "multi_gpu", "use_deepspeed", "use_fsdp", "env"),
)
"""Options of ``accelerate launch`` that ``trl NAME`` passes on, and the variables that its file sets."""


def of_command(entry: str, words: Sequence[Word], script: str) -> tuple[FrameworkOptions, dict[str, str]]:
    """The fields and the options of the launcher from ``trl grpo --flag value ...``.

    ``--config FILE`` is read too; flags have precedence."""
    source = fields_of(entry)
    options = {flag.name.replace("-", "_"): flag for flag in flags(words, script, source.problems)}
    launcher = dict[str, str]()
    if "config" in options and len(options["config"].texts) == 1:
        path = options.pop("config").texts[0]
        with source.reading():
            launcher = _take(source, _mapping(path), path)
    for name, flag in options.items():
        texts = flag.texts
        if name in LAUNCHER:
            launcher[name] = " ".join(texts)
            continue
        if name.startswith("no_") and name not in source.rows:  # of a switch that is on by default
            name, texts = name.removeprefix("no_"), ["false"]
        source.give(name, texts, flag.text, flag.location, value_of)
    return source, launcher


def of_mapping_file(path: str) -> tuple[FrameworkOptions, dict[str, str]]:
    """The fields and the launcher's options from a configuration in YAML or JSON. The fields determine the trainer.

    If several trainers have the same number of its fields, the path decides."""
    fields = _mapping(path)
    names = [name for name in fields if name not in LAUNCHER]
    unknown = dict[str, list[str]]()
    for entry in GROUPS:
        names_of_rows = {other for row in fields_of(entry).rows.values() for other in (row.name, *row.old)}
        unknown[entry] = [name for name in names if name not in names_of_rows]
    fewest = min(map(len, unknown.values()))
    fitting = [entry for entry in GROUPS if len(unknown[entry]) == fewest]
    for text in (Path(path).name, path):  # the path decides if the fields do not
        candidates = [entry for entry in GROUPS if re.search(entry, text.lower())]
        fitting = candidates if len(candidates) == 1 else [entry for entry in fitting if entry in candidates] or fitting
        if len(fitting) == 1:
            break
    if len(fitting) != 1 or len(unknown[fitting[0]]) * 2 > len(names):
        means = f"its fields fit {', '.join(fitting)}" if fewest * 2 <= len(names) else "its fields fit no trainer"
        raise ConfigError(f'{path}: {means}. Name the trainer: rlhf migrate trl "trl NAME --config {path}"')
    source = fields_of(fitting[0])
    source.origin = f"{source.entry} ({Path(path).name})"
    return source, _take(source, fields, Path(path).name)


def processes_of_config(config: str) -> int | None:
    """The number of processes that a configuration of ``accelerate``, or a named configuration of TRL, starts.

    Raises ConfigError if the file is not on this machine."""
    if config in ("zero1", "zero2", "zero3", "fsdp1", "fsdp2", "multi_gpu", "single_gpu"):
        return 1 if config == "single_gpu" else 8
    fields = _mapping(config)
    count = 1 if fields.get("distributed_type") in ("NO", False) else fields.get("num_processes")
    return count if isinstance(count, int) else None


def fields_of(entry: str) -> FrameworkOptions:
    groups = table("trl")
    return FrameworkOptions(NAME, groups, rows_of(groups, GROUPS[entry]), entry)


def _take(source: FrameworkOptions, fields: Mapping[str, Any], location: str) -> dict[str, str]:
    """Store the fields of a file. Returns the fields of the launcher."""
    for name, value in fields.items():
        if name not in LAUNCHER:
            source.give(name, value, f"{name}: {value}", location)
    return {name: str(value) for name, value in fields.items() if name in LAUNCHER}


def _mapping(path: str) -> dict[str, Any]:
    """The fields of a file in YAML or JSON."""
    import yaml

    try:
        fields = yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} should contain fields with values, got {type(fields).__name__}")
    return {str(name): value for name, value in fields.items()}


def is_file_of_fields(source: str) -> bool:
    """Whether a source is a file in YAML or JSON."""
    return os.path.isfile(source) and Path(source).suffix in (".yaml", ".yml", ".json")
