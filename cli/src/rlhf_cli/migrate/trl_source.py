"""Fields of TRL's trainers from a command line, a file in YAML or JSON, or the literals of a Python script."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

from rlhf_cli.migrate.rows import FrameworkOptions, OptionRow, OptionValue, matching, rows_of, table, typed, value_of
from rlhf_cli.migrate.shell import Word, known_text
from rlhf_cli.migrate.trl import GROUPS, NAME

CONFIGS = {f"{name}Config": name.lower() for name in ("GRPO", "RLOO", "SFT", "DPO", "Reward", "KTO")}
"""{class of TRL: trainer}."""
LORA = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
}
"""{argument of PEFT's LoraConfig: field of ModelConfig}, where the names differ."""
LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""PEFT's defaults, which are not those of ModelConfig."""


def of_command(entry: str, words: Sequence[Word], where: str) -> FrameworkOptions:
    """From ``trl grpo --flag value ...``. ``--config FILE`` is read too; flags have precedence."""
    source = _source(entry)
    rest, options = list(words), dict[str, OptionValue]()
    while rest:
        word = rest.pop(0)
        here = f"{where}, line {word.line}"
        flag, equals, text = known_text(word, where).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{here}: {flag!r} is not an option and belongs to none")
        values = [text] if equals else []
        while rest and not rest[0].text.startswith("--") and not equals:
            values.append(known_text(rest.pop(0), where))
        name, text = (
            flag.removeprefix("--").replace("-", "_"),
            " ".join([flag, *values] if not equals else [word.text]),
        )
        if name == "config" and len(values) == 1:
            _take(source, _mapping(values[0]), values[0])
            continue
        if name.startswith("no_") and name not in source.rows:  # of a switch that is on by default
            name, values = name.removeprefix("no_"), ["false"]
        for row in _matching(source, name, here):
            options[row.name] = OptionValue(value_of(row, values, here), flag + " ..." if row.secret else text, here)
    source.given |= options
    return source


def of_mapping_file(path: str) -> FrameworkOptions:
    """From a configuration in YAML or JSON, whose fields say which trainer it is for."""
    fields = _mapping(path)
    groups = table("trl")
    fitting = [entry for entry in GROUPS if all(name in rows_of(groups, GROUPS[entry]) for name in fields)]
    if len(fitting) != 1:
        means = f"its fields fit {', '.join(fitting)}" if fitting else "its fields fit no trainer"
        raise ConfigError(f'{path}: {means}. Say which one it is for: rlhf migrate trl "trl NAME --config {path}"')
    source = _source(fitting[0])
    _take(source, fields, Path(path).name)
    return source


def of_script(path: str, settings: Mapping[str, str]) -> FrameworkOptions:
    """From the keyword arguments of ``GRPOConfig(...)`` and its like, of ``LoraConfig(...)`` and of the trainer's
    ``model``. The script is parsed, never executed."""
    where = Path(path).name
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ConfigError(f"{where}, line {error.lineno}: not Python: {error.msg}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [call for call in calls if _name(call) in CONFIGS]
    if len(configs) != 1:
        lines = ", ".join(f"{_name(call)} in line {call.lineno}" for call in configs) or "none"
        raise ConfigError(f"{where}: one of {', '.join(CONFIGS)} is read, and it has {lines}")
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    source = _source(CONFIGS[_name(configs[0])])
    for call in calls:
        kind = _name(call)
        if call is configs[0]:
            names = {}
        elif kind == "LoraConfig":
            names = LORA
            for name, value in {"use_peft": True, **LORA_DEFAULTS}.items():
                source.given[name] = OptionValue(value, f"LoraConfig's {name}", f"{where}, line {call.lineno}")
        else:
            continue
        for keyword in call.keywords:
            here = f"{where}, line {keyword.value.lineno}"
            if keyword.arg is None:
                raise ConfigError(f"{here}: {kind}(**...) cannot be read; write its arguments out")
            name = names.get(keyword.arg, keyword.arg)
            value = _literal(keyword.value, keyword.arg, constants, settings, here)
            _give(source, name, value, f"{keyword.arg}={value!r}", here)
    for call in calls:
        if _name(call).endswith("Trainer"):
            for keyword in call.keywords:
                if keyword.arg == "model" and isinstance(keyword.value, ast.Constant | ast.Name):
                    here = f"{where}, line {keyword.value.lineno}"
                    value = _literal(keyword.value, "model", constants, settings, here)
                    _give(source, "model_name_or_path", value, f"model={value!r}", here)
    return source


def _source(entry: str) -> FrameworkOptions:
    return FrameworkOptions(rows_of(table("trl"), GROUPS[entry]), entry, NAME)


def _matching(source: FrameworkOptions, name: str, where: str) -> list[OptionRow]:
    return matching(source.rows, name, where, table("trl"))


def _give(source: FrameworkOptions, name: str, value: Any, text: str, where: str) -> None:
    for row in _matching(source, name, where):
        label = f"{name}: ..." if row.secret else text
        source.given[row.name] = OptionValue(typed(row, value, where), label, where)


def _take(source: FrameworkOptions, fields: Mapping[str, Any], where: str) -> None:
    for name, value in fields.items():
        _give(source, name, value, f"{name}: {value}", where)


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


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _literal(
    node: ast.expr, name: str, constants: Mapping[str, ast.expr], settings: Mapping[str, str], where: str
) -> Any:
    """The value of an argument: a literal, or the name of one."""
    if name in settings:
        return settings[name]
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ConfigError(
            f"{where}: {name}={ast.unparse(node)} is no literal, and nothing is executed. Give it: --set {name}=VALUE"
        ) from None


def is_file_of_fields(source: str) -> bool:
    """Whether a source is a file in YAML or JSON."""
    return os.path.isfile(source) and Path(source).suffix in (".yaml", ".yml", ".json")
