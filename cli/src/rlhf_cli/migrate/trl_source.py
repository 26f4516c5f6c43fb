"""Fields of TRL's trainers from a command line, a file in YAML or JSON, or the literals of a Python script."""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

from rlhf_cli.migrate.rows import FrameworkOptions, OptionRow, OptionValue, matching, rows_of, table, typed, value_of
from rlhf_cli.migrate.shell import Word, known_text
from rlhf_cli.migrate.trl import GROUPS, NAME

CONFIGS = {f"{name}Config": name.lower() for name in ("GRPO", "RLOO", "SFT", "DPO", "Reward", "KTO")}
"""{class of TRL: trainer}."""
TRAINERS = {f"{name}Trainer": name.lower() for name in ("GRPO", "RLOO", "SFT", "DPO", "Reward", "KTO")}
LAUNCHER = (
    *("num_processes", "num_machines", "accelerate_config", "config_file", "machine_rank", "main_process_ip"),
    *("main_process_port", "mixed_precision", "gpu_ids", "multi_gpu", "use_deepspeed", "use_fsdp", "env"),
)
"""Options of ``accelerate launch`` that ``trl NAME`` passes on, and the variables that its file sets."""
LORA = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
}
"""{argument of PEFT's LoraConfig: field of ModelConfig}, where the names differ."""
LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""PEFT's defaults, which are not those of ModelConfig."""
LORA_ONLY = {"bias": "none", "init_lora_weights": True, "inference_mode": False, "fan_in_fan_out": False}
"""PEFT's defaults of arguments that have no counterpart."""
QUANTIZED = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
}
"""{argument of BitsAndBytesConfig: field of ModelConfig}."""
OF_DEVICES = ("device_map", "low_cpu_mem_usage", "use_cache")
"""Arguments of ``from_pretrained`` that change no result."""


def of_command(entry: str, words: Sequence[Word], where: str) -> tuple[FrameworkOptions, dict[str, str]]:
    """From ``trl grpo --flag value ...``: the fields, and the options of the launcher.

    ``--config FILE`` is read too; flags have precedence."""
    source = _source(entry)
    rest, options, launcher = list(words), dict[str, OptionValue](), dict[str, str]()
    files = dict[str, str]()
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
            files |= _take(source, _mapping(values[0]), values[0])
            continue
        if name in LAUNCHER:
            launcher[name] = " ".join(values)
            continue
        if name.startswith("no_") and name not in source.rows:  # of a switch that is on by default
            name, values = name.removeprefix("no_"), ["false"]
        for row in _matching(source, name, here):
            options[row.name] = OptionValue(value_of(row, values, here), flag + " ..." if row.secret else text, here)
    source.given |= options
    return source, files | launcher


def of_mapping_file(path: str) -> tuple[FrameworkOptions, dict[str, str]]:
    """From a configuration in YAML or JSON, whose fields say which trainer it is for; also its launcher's options."""
    fields = _mapping(path)
    groups = table("trl")
    names = [name for name in fields if name not in LAUNCHER]
    fitting = [entry for entry in GROUPS if all(name in rows_of(groups, GROUPS[entry]) for name in names)]
    if len(fitting) != 1:
        means = f"its fields fit {', '.join(fitting)}" if fitting else "its fields fit no trainer"
        raise ConfigError(f'{path}: {means}. Say which one it is for: rlhf migrate trl "trl NAME --config {path}"')
    source = _source(fitting[0])
    return source, _take(source, fields, Path(path).name)


def processes_of_config(config: str) -> int | None:
    """The processes that a configuration of ``accelerate`` starts, or one that TRL has under a name.

    Raises ConfigError where the file is not here."""
    if config in ("zero1", "zero2", "zero3", "fsdp1", "fsdp2", "multi_gpu", "single_gpu"):
        return 1 if config == "single_gpu" else 8
    fields = _mapping(config)
    count = 1 if fields.get("distributed_type") in ("NO", False) else fields.get("num_processes")
    return count if isinstance(count, int) else None


def of_script(path: str, settings: Mapping[str, str]) -> FrameworkOptions:
    """From the keyword arguments of ``GRPOConfig(...)`` and its like, of ``LoraConfig(...)``, and of the trainer: its
    ``model``, its data where they are ``load_dataset(...)``, and its rewards by name. The script is parsed, never
    executed."""
    where = Path(path).name
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise ConfigError(f"{where}, line {error.lineno}: not Python: {error.msg}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = [call for call in calls if _name(call) in CONFIGS]
    trainers = [call for call in calls if _name(call) in TRAINERS]
    starts = configs or [call for call in trainers if not any(keyword.arg == "args" for keyword in call.keywords)]
    if len(starts) != 1:
        lines = ", ".join(f"{_name(call)} in line {call.lineno}" for call in starts) or "none with its arguments"
        flags = f'. If it reads flags, give the whole command: "python {where} --FLAG VALUE"' if not starts else ""
        classes = ", ".join(CONFIGS)
        raise ConfigError(f"{where}: one of {classes}, or of their trainers, is read, and it has {lines}{flags}")
    script = _PythonScript(tree, settings, where)
    source = _source((CONFIGS | TRAINERS)[_name(starts[0])])
    for call in calls:
        kind = _name(call)
        if call in configs:
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
            value = script.literal(keyword.value, keyword.arg)
            if kind == "LoraConfig" and keyword.arg in LORA_ONLY:
                if value != LORA_ONLY[keyword.arg]:
                    raise ConfigError(f"{here}: {keyword.arg}={value!r} has no counterpart; leave it out")
                continue
            _give(source, name, value, f"{keyword.arg}={value!r}", here)
    for keyword in [keyword for call in calls if _name(call).endswith("Trainer") for keyword in call.keywords]:
        for name, value in script.of_trainer(keyword).items():
            _give(source, name, value, f"{keyword.arg}: {value!r}", f"{where}, line {keyword.value.lineno}")
    for call in trainers:
        for name, value in script.rows(call).items():
            _give(source, name, value, f"load_dataset: {value!r}", f"{where}, line {call.lineno}")
    return source


@dataclass
class _PythonScript:
    """The names of a script that have one value."""

    tree: ast.Module
    settings: Mapping[str, str]
    where: str

    def __post_init__(self) -> None:
        self.values: dict[str, list[ast.Assign]] = {}
        others = set[str]()
        for node in ast.walk(self.tree):
            targets = list[ast.expr]()
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AugAssign | ast.For | ast.NamedExpr):
                targets = [node.target]
            if isinstance(node, ast.Assign) and len(targets) == 1 and isinstance(targets[0], ast.Name):
                self.values.setdefault(targets[0].id, []).append(node)
            else:
                others |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        in_functions = [n for f in self.tree.body if isinstance(f, ast.FunctionDef) for n in ast.walk(f)]
        self.function_lines = {node.lineno for node in in_functions if isinstance(node, ast.expr)}
        for name, assignments in self.values.items():
            one_after_another = all(node in self.tree.body for node in assignments)
            if name in others or (len(assignments) > 1 and not one_after_another):
                self.values[name] = []
        self.imports = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and not node.level
            for alias in node.names
        }

    def value(self, node: ast.expr) -> ast.expr:
        """What a name stands for in its line: its only value, or the last one above, at the top level of the script."""
        assignments = self.values.get(node.id, []) if isinstance(node, ast.Name) else []
        if len(assignments) > 1:
            above = [] if node.lineno in self.function_lines else [a for a in assignments if a.lineno < node.lineno]
            assignments = above[-1:]
        return assignments[0].value if assignments else node

    def literal(self, node: ast.expr, name: str) -> Any:
        """The value of an argument: a literal, or the name of one."""
        if name in self.settings:
            return self.settings[name]
        try:
            return ast.literal_eval(_Literals(self.value).visit(copy.deepcopy(node)))
        except ValueError:
            raise ConfigError(
                f"{self.where}, line {node.lineno}: {name}={ast.unparse(node)} is no literal, and nothing is executed. "
                f"Give it: --set {name}=VALUE"
            ) from None

    def of_trainer(self, keyword: ast.keyword) -> dict[str, Any]:
        """Fields that an argument of the trainer stands for."""
        node = self.value(keyword.value)
        match keyword.arg:
            case "model" if "model" in self.settings:
                return {"model_name_or_path": self.settings["model"]}
            case "model" if isinstance(node, ast.Call) and _name(node) == "from_pretrained" and node.args:
                fields, options = {"model_name_or_path": self.literal(node.args[0], "model")}, dict[str | None, Any]()
                for option in node.keywords:
                    value = self.value(option.value)
                    if isinstance(value, ast.Call) and _name(value) == "BitsAndBytesConfig":
                        fields |= {
                            QUANTIZED[k.arg]: self.literal(k.value, k.arg) for k in value.keywords if k.arg in QUANTIZED
                        }
                    elif option.arg not in OF_DEVICES:
                        options[option.arg] = self.literal(option.value, "model")
                return fields | ({"model_init_kwargs": options} if options else {})
            case "model" if isinstance(node, ast.Constant | ast.Name | ast.Call):
                return {"model_name_or_path": self.literal(keyword.value, "model")}
            case "reward_funcs":
                nodes = node.elts if isinstance(node, ast.List) else [node]
                names = [self.imports[n.id] for n in nodes if isinstance(n, ast.Name) and n.id in self.imports]
                if len(names) == len(nodes):
                    return {"reward_funcs": [name.removeprefix("trl.rewards.") for name in names]}
        return {}

    def rows(self, trainer: ast.Call) -> dict[str, Any]:
        """The fields of the trainer's data, where all of them are of one ``load_dataset(...)``; else none."""
        nodes = {keyword.arg: keyword.value for keyword in trainer.keywords}
        train = self._rows(nodes.get("train_dataset"), "dataset_train_split")
        if "eval_dataset" not in nodes or not train:
            return train
        evaluation = self._rows(nodes["eval_dataset"], "dataset_test_split")
        names = ("dataset_name", "dataset_config")
        same = evaluation and all(evaluation.get(name) == train.get(name) for name in names)
        return train | evaluation if same else {}

    def _rows(self, node: ast.expr | None, split: str) -> dict[str, Any]:
        """The fields for ``load_dataset(NAME, CONFIG, split=SPLIT)`` and ``load_dataset(NAME)[SPLIT]``."""
        fields = dict[str, Any]()
        node = self.value(node) if node else None
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            fields[split], node = node.slice.value, self.value(node.value)
        if not isinstance(node, ast.Call) or _name(node) != "load_dataset":
            return {}
        names = {"path": "dataset_name", "name": "dataset_config", "split": split, "data_files": "data_files"}
        values = dict(zip(names, node.args, strict=False)) | {k.arg or "": k.value for k in node.keywords}
        if len(node.args) > 2 or not values.keys() <= names.keys():
            return {}
        fields |= {names[name]: self.literal(value, name) for name, value in values.items()}
        if files := fields.pop("data_files", None):  # load_dataset("json", data_files="rows.jsonl")
            fields["dataset_name"] = files
        return fields if split in fields and isinstance(fields["dataset_name"], str) else {}


class _Literals(ast.NodeTransformer):
    """Names of literals become these, ``torch.bfloat16`` the text ``bfloat16``, f-strings of literals texts."""

    def __init__(self, value_of_name: Callable[[ast.expr], ast.expr]) -> None:
        self.value_of_name = value_of_name

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.value_of_name(node)
        return value if isinstance(value, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.UnaryOp) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        return ast.Constant(node.attr) if of_torch else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        parts = [self.visit(p.value) if isinstance(p, ast.FormattedValue) else p for p in node.values]
        texts = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
        formats = any(isinstance(p, ast.FormattedValue) and (p.format_spec or p.conversion != -1) for p in node.values)
        return node if formats or len(texts) < len(parts) else ast.Constant("".join(texts))


def _source(entry: str) -> FrameworkOptions:
    return FrameworkOptions(rows_of(table("trl"), GROUPS[entry]), entry, NAME)


def _matching(source: FrameworkOptions, name: str, where: str) -> list[OptionRow]:
    return matching(source.rows, name, where, table("trl"))


def _give(source: FrameworkOptions, name: str, value: Any, text: str, where: str) -> None:
    for row in _matching(source, name, where):
        label = f"{name}: ..." if row.secret else text
        source.given[row.name] = OptionValue(typed(row, value, where), label, where)


def _take(source: FrameworkOptions, fields: Mapping[str, Any], where: str) -> dict[str, str]:
    """Keep the fields of a file; those of the launcher."""
    for name, value in fields.items():
        if name not in LAUNCHER:
            _give(source, name, value, f"{name}: {value}", where)
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


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def is_file_of_fields(source: str) -> bool:
    """Whether a source is a file in YAML or JSON."""
    return os.path.isfile(source) and Path(source).suffix in (".yaml", ".yml", ".json")
