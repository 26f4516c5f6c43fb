"""Fields of TRL's trainers from a Python script or a notebook, which is parsed and never executed."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

from rlhf_cli.migrate.python_values import PythonValues, name_of, source_of
from rlhf_cli.migrate.rows import FrameworkOptions, OptionValue
from rlhf_cli.migrate.trl_source import CONFIGS, TRAINERS, fields_of

LORA = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
}
"""{argument of PEFT's LoraConfig: field of ModelConfig}, where the names differ."""
LORA_DEFAULTS = {
    "LoraConfig": {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0},
    "get_peft_model": {"lora_r": 16, "lora_alpha": 16, "lora_dropout": 0.0},
}
"""Defaults of PEFT and of unsloth that differ from ModelConfig's."""
LORA_ONLY: Mapping[str, Sequence[Any]] = {
    "bias": ["none"],
    "init_lora_weights": [True],
    "inference_mode": [False],
    "fan_in_fan_out": [False],
    "loftq_config": [None, {}],
}
"""{argument without a counterpart: values that match the behaviour of a run}."""
UNSLOTH = ("model", "use_gradient_checkpointing", "random_state", "max_seq_length")
"""Arguments of unsloth's ``get_peft_model`` that are not about adapters."""
QUANTIZED = {
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
}
"""{argument of BitsAndBytesConfig: field of ModelConfig}."""
OF_MODEL = ("device_map", "low_cpu_mem_usage", "use_cache", "token", "cache_dir", "num_labels")
"""Arguments of ``from_pretrained`` that change no result: a reward model has one label in any case."""
OF_LOADING = ("cache_dir", "token", "trust_remote_code", "num_proc", "verification_mode")
"""Arguments of ``load_dataset`` that change no rows."""
WRAPPERS = ("get_peft_model", "prepare_model_for_kbit_training", "to", "cuda")
FAST_MODELS = ("FastLanguageModel", "FastModel", "FastVisionModel")
ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "UnslothTrainingArguments")
"""Configurations that trainers used before they had their own."""
ARGUMENT_DEFAULTS = {"learning_rate": 5e-5, "bf16": False, "gradient_checkpointing": False}
"""Defaults of transformers' TrainingArguments that differ from those of TRL's configurations. SFTTrainer takes them
over; the other trainers need a configuration of their own."""
ROWS = ("data_collator", "train_dataset", "eval_dataset")
PLACES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("grpo", "rloo"), ("model", "reward_funcs", "args", *ROWS[1:])),
    **dict.fromkeys(("dpo", "kto"), ("model", "ref_model", "args", *ROWS)),
    **dict.fromkeys(("sft", "reward"), ("model", "args", *ROWS)),
}
"""{trainer: its first arguments}. They may be written without their names."""
OF_TRAINER = ("args", "train_dataset", "eval_dataset", "tokenizer", "processing_class", "peft_config", "reward_funcs")
"""Arguments of trainers that are read elsewhere, or belong to the model."""
TO_DO: Mapping[str, str] = {
    "data_collator": 'it decides which tokens are trained on: set data.loss_on to "completion", "assistant" or "all"',
    "formatting_func": "it builds the text of a row: set data.input_template, or give rows with columns that a run "
    "reads",
    "callbacks": "use an observer, which sees every step and may stop a run",
    "compute_metrics": "choose one of the run's metrics with eval.metric",
    "ref_model": "set reference.model if it is not the policy's model",
    "tools": 'the rollout tools has functions: rollout.use = "tools", rollout.functions',
    "environment_factory": 'write it as an environment: rollout.use = "multi_turn", env.use',
    "rollout_func": 'write it as a rollout: rollout.use = "file:FILE.py"',
    "reward_processing_classes": "a reward model reads texts with its own tokenizer",
    "optimizers": "set trainer.optimizer, trainer.lr and trainer.schedule",
    "optimizer_cls_and_kwargs": "set trainer.optimizer and trainer.lr",
    "compute_loss_func": "write it as a loss: algorithm.loss.use",
    "preprocess_logits_for_metrics": "choose one of the run's metrics with eval.metric",
}
"""{argument of a trainer: what the user has to do}."""


def of_script(path: str, settings: Mapping[str, str], flags: Mapping[str, Sequence[str]] = {}) -> FrameworkOptions:
    """The options from the keyword arguments of ``GRPOConfig(...)`` and similar calls, of ``LoraConfig(...)``, and of
    the trainer: its ``model``, its data if they are ``load_dataset(...)``, and its rewards by name.

    Args:
        flags: flags of the command that starts the script, which ``argparse`` or a dataclass reads."""
    script = Path(path).name
    values = PythonValues(_tree(path), settings, script, flags)
    trainers = [call for call in values.calls if name_of(call) in TRAINERS]
    for call in trainers:
        _name_arguments(call, PLACES[TRAINERS[name_of(call)]], script)
    start, entry = _start(values, trainers, script)
    source = fields_of(entry)
    source.origin = f"{entry} ({script})"
    if name_of(start) in ARGUMENTS[:2]:
        for name, value in ARGUMENT_DEFAULTS.items():
            option = OptionValue(value, f"{name_of(start)}'s {name}", f"{script}, line {start.lineno}")
            source.user_values[name] = option
    if name_of(start) in (*CONFIGS, *ARGUMENTS):
        _name_arguments(start, ("output_dir",), script)
        _take_call(source, values, start)
    chosen = [call for call in trainers if any(values.node(k.value) is start for k in call.keywords)] or trainers
    adapters = [values.node(k.value) for call in chosen for k in call.keywords if k.arg == "peft_config"]
    for call in values.calls:
        of_another = call not in adapters and (len(trainers) > len(chosen) or any(n in values.calls for n in adapters))
        if name_of(call) == "LoraConfig" and of_another:
            source.remarks.append(
                f"{script}, line {call.lineno}: this LoraConfig does not belong to the trainer that is read"
            )
        elif name_of(call) == "LoraConfig" or (
            name_of(call) == "get_peft_model" and {"r", "lora_alpha"} & {keyword.arg for keyword in call.keywords}
        ):
            _lora(source, values, call)
        elif name_of(call) == "from_pretrained" and _owner(call) in FAST_MODELS:
            with source.reading():
                _take(source, _fast_model(values, call), f"{script}, line {call.lineno}")
    for call in chosen:
        _trainer(source, values, call)
        with source.reading():
            _take(source, _rows_of(values, call), f"{script}, line {call.lineno}")
    _stores(source, values, start)
    unread = [f"--{name} {' '.join(texts)}".strip() for name, texts in flags.items() if name not in values.read_flags]
    if unread:
        source.remarks.append(f"flags that only the script's own code may read: {', '.join(unread)}")
    return source


def trainer_of_parser(path: str) -> str | None:
    """The trainer of a script whose parser creates one of TRL's configurations; None for another script."""
    names = {node.id for node in ast.walk(_tree(path)) if isinstance(node, ast.Name) and node.id in CONFIGS}
    return CONFIGS[names.pop()] if len(names) == 1 else None


def is_script(path: str) -> bool:
    """Whether a file is a script or a notebook that creates one of TRL's trainers, or configures one by a call."""
    try:
        calls = {name_of(node) for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)}
    except (ConfigError, OSError):
        return False
    return bool(calls & (CONFIGS.keys() | (set(ARGUMENTS) if calls & TRAINERS.keys() else set())))


def _tree(path: str) -> ast.Module:
    try:
        return ast.parse(source_of(path))
    except (SyntaxError, ValueError, UnicodeDecodeError, KeyError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{Path(path).name}{line}: not Python: {error}") from None


def _start(values: PythonValues, trainers: Sequence[ast.Call], script: str) -> tuple[ast.Call, str]:
    """(call that configures the trainer, name of the trainer)."""
    starts = [call for call in values.calls if name_of(call) in CONFIGS and name_of(call) not in values.classes]
    without_args = [call for call in trainers if not any(keyword.arg == "args" for keyword in call.keywords)]
    old = [call for call in values.calls if name_of(call) in ARGUMENTS]
    if not starts and len(trainers) == 1 and (old or without_args):
        return (without_args or old)[0], TRAINERS[name_of(trainers[0])]
    starts = starts or without_args
    if "line" in values.settings:
        starts = [call for call in starts if str(call.lineno) == values.settings["line"]]
    if len(starts) == 1:
        return starts[0], (CONFIGS | TRAINERS)[name_of(starts[0])]
    lines = ", ".join(f"{name_of(call)} in line {call.lineno}" for call in starts) or "none with its arguments"
    advice = ". Choose one: --set line=N" if starts else ""
    if not starts:
        advice = f'. If it reads flags, give the whole command: "python {script} --FLAG VALUE"'
    raise ConfigError(
        f"{script}: expected one of {', '.join(CONFIGS)}, or of their trainers; the script has {lines}{advice}"
    )


def _name_arguments(call: ast.Call, places: Sequence[str], script: str) -> None:
    """Turn the arguments of a trainer that are written without names into keywords."""
    if len(call.args) > len(places):
        raise ConfigError(
            f"{script}, line {call.lineno}: only the first {len(places)} arguments of {name_of(call)} are read without "
            f"their names ({', '.join(places)}). Write the others as NAME=VALUE"
        )
    call.keywords[:0] = [ast.keyword(name, value) for name, value in zip(places, call.args, strict=False)]
    call.args = []


def _take(source: FrameworkOptions, fields: Mapping[str, Any], location: str, names: Mapping[str, str] = {}) -> None:
    """Store fields. ``names``: {name in the script: field of TRL}, if these differ."""
    for name, value in fields.items():
        source.give(names.get(name, name), value, f"{name}={value!r}", location)


def _take_call(source: FrameworkOptions, values: PythonValues, call: ast.Call, names: Mapping[str, str] = {}) -> None:
    """Store the keyword arguments of a call."""
    for keyword in call.keywords:
        location = f"{values.location}, line {keyword.value.lineno}"
        if keyword.arg is not None:
            _take_argument(source, values, keyword.arg, keyword.value, location, names)
            continue
        try:
            entries = dict(values.literal(keyword.value, "**"))
        except (ConfigError, TypeError, ValueError):
            text = f"{name_of(call)}(**{ast.unparse(keyword.value)})"
            source.unknown[text] = text, f"{location}: {text} is computed by code, which is not executed"
        else:
            _take(source, entries, location, names)


def _decides(source: FrameworkOptions, name: str) -> bool:
    """Whether a run depends on a field."""
    return any(row.to for row in source.rows.values() if name in (row.name, *row.old))


def _take_argument(
    source: FrameworkOptions,
    values: PythonValues,
    name: str,
    node: ast.expr,
    location: str,
    names: Mapping[str, str] = {},
) -> None:
    """Store an argument: its value, or its text if it is unknown or the run does not depend on it."""
    field = names.get(name, name)
    with source.reading():
        if _decides(source, field):
            _take(source, {name: values.literal(node, name)}, location, names)
        else:
            text = ast.unparse(node)
            source.give(field, text, f"{name}={text}", location, lambda row, value, location: value)


def _lora(source: FrameworkOptions, values: PythonValues, call: ast.Call) -> None:
    kind, location = name_of(call), f"{values.location}, line {call.lineno}"
    for name, value in {"use_peft": True, **LORA_DEFAULTS[kind]}.items():
        source.user_values[name] = OptionValue(value, f"{kind}'s {name}", location)
    if kind == "get_peft_model":
        targets = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
        source.user_values["lora_target_modules"] = OptionValue(targets, "unsloth's target_modules", location)
    lora_call = ast.Call(call.func, [], [])
    for keyword in call.keywords:
        name = keyword.arg or ""
        if name in LORA_ONLY:
            with source.reading():
                if (value := values.literal(keyword.value, name)) not in LORA_ONLY[name]:
                    raise ConfigError(f"{location}: {name}={value!r} has no equivalent; remove it")
        elif kind == "LoraConfig" or name not in UNSLOTH:
            lora_call.keywords.append(keyword)
    _take_call(source, values, lora_call, LORA)


def _owner(call: ast.Call) -> str:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner.id if isinstance(owner, ast.Name) else ""


def _fast_model(values: PythonValues, call: ast.Call) -> dict[str, Any]:
    """The fields for unsloth's ``FastLanguageModel.from_pretrained(...)``."""
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    node = options.get("model_name") or (call.args[0] if call.args else None)
    fields = {"model_name_or_path": values.literal(node, "model")} if node is not None else {}
    quantized = {
        name: values.literal(options[name], name) for name in ("load_in_4bit", "load_in_8bit") if name in options
    }
    return fields | {"load_in_4bit": True, "dtype": "bfloat16"} | quantized


def _trainer(source: FrameworkOptions, values: PythonValues, call: ast.Call) -> None:
    """The arguments of a trainer. In versions before trainers had their own configurations, also fields of these."""
    for keyword in call.keywords:
        location, name = f"{values.location}, line {keyword.value.lineno}", keyword.arg or ""
        with source.reading():
            if keyword.arg == "model":
                fields = _model(values, keyword.value)
                if not fields and "model_name_or_path" not in source.user_values and "model" not in values.settings:
                    source.remarks.append(f"name the model: policy.model; {ast.unparse(keyword.value)} is not read")
                _take(source, fields, location)
            elif keyword.arg == "reward_funcs":
                _rewards(source, values, keyword.value, location)
            elif name in TO_DO and ast.unparse(keyword.value) not in ("None", "[]"):
                text = f"{name}={ast.unparse(keyword.value)}"
                source.remarks.append(f"{location}: {text} of the trainer is not read; {TO_DO[name]}")
            elif name == "quantization_config":
                _take(source, _quantization(values, keyword.value), location)
            elif name not in (*OF_TRAINER, *TO_DO, ""):
                _take_argument(source, values, name, keyword.value, location)


def _model(values: PythonValues, argument: ast.expr) -> dict[str, Any]:
    """The fields for the model of a trainer."""
    if "model" in values.settings:
        return {"model_name_or_path": values.settings["model"]}
    node = values.node(argument)
    while isinstance(node, ast.Call) and name_of(node) in WRAPPERS:  # a wrapper of the same model
        node = values.node(node.args[0] if name_of(node) in WRAPPERS[:2] else getattr(node.func, "value", None))
    if not (isinstance(node, ast.Call) and name_of(node) == "from_pretrained" and node.args):
        try:
            value = values.literal(argument, "model")
        except ConfigError:
            return {}
        return {"model_name_or_path": value} if isinstance(value, str) else {}
    fields, options = {"model_name_or_path": values.literal(node.args[0], "model")}, dict[str | None, Any]()
    for option in node.keywords:
        if option.arg == "quantization_config":
            fields |= _quantization(values, option.value)
        elif option.arg not in OF_MODEL:
            options[option.arg] = values.literal(option.value, option.arg or "model")
    return fields | ({"model_init_kwargs": options} if options else {})


def _quantization(values: PythonValues, argument: ast.expr) -> dict[str, Any]:
    """The fields for a ``BitsAndBytesConfig(...)``. Another value but None is an unknown option."""
    node = values.node(argument)
    if not isinstance(node, ast.Call) or name_of(node) != "BitsAndBytesConfig":
        text = ast.unparse(argument)
        return {} if text == "None" else {"quantization_config": text}
    options = {keyword.arg: keyword.value for keyword in node.keywords}
    return {field: values.literal(options[name], name) for name, field in QUANTIZED.items() if name in options}


def _rewards(source: FrameworkOptions, values: PythonValues, argument: ast.expr, location: str) -> None:
    node = values.node(argument)
    nodes = node.elts if isinstance(node, ast.List) else [node] if node is not None else []
    names = [values.imports[n.id] for n in nodes if isinstance(n, ast.Name) and n.id in values.imports]
    if nodes and len(names) == len(nodes):
        names = [name.removeprefix("trl.rewards.") for name in names]
        source.give("reward_funcs", names, f"reward_funcs: {names!r}", location)
    elif nodes:
        texts = ", ".join(ast.unparse(n) for n in nodes)
        source.remarks.append(
            f"the script's rewards are {texts} ({location}): move functions of the script to a file that trains "
            "nothing, and name each of them as a reward, file:FILE.py:NAME"
        )


def _rows_of(values: PythonValues, trainer: ast.Call) -> dict[str, Any]:
    """The fields for the trainer's data if all of it comes from one ``load_dataset(...)``; else none."""
    nodes = {keyword.arg: keyword.value for keyword in trainer.keywords}
    train = _source_of_rows(values, nodes.get("train_dataset"), "dataset_train_split")
    if "eval_dataset" not in nodes or not train:
        return train
    evaluation = _source_of_rows(values, nodes["eval_dataset"], "dataset_test_split")
    names = ("dataset_name", "dataset_config")
    is_same = evaluation and all(evaluation.get(name) == train.get(name) for name in names)
    return train | evaluation if is_same else {}


def _source_of_rows(values: PythonValues, argument: ast.expr | None, split: str) -> dict[str, Any]:
    """The fields for ``load_dataset(NAME, CONFIG, split=SPLIT)`` and ``load_dataset(NAME)[SPLIT]``."""
    fields = dict[str, Any]()
    node = values.node(argument)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        fields[split], node = node.slice.value, values.node(node.value)
    if not isinstance(node, ast.Call) or name_of(node) != "load_dataset":
        return {}
    names = {"path": "dataset_name", "name": "dataset_config", "split": split, "data_files": "data_files"}
    options = dict(zip(names, node.args, strict=False))
    options |= {k.arg or "": k.value for k in node.keywords if k.arg not in OF_LOADING}
    if len(node.args) > 2 or not options.keys() <= names.keys():
        return {}
    fields |= {names[name]: values.literal(option, name) for name, option in options.items()}
    if files := fields.pop("data_files", None):  # load_dataset("json", data_files="rows.jsonl")
        fields["dataset_name"] = files
    return fields if split in fields and isinstance(fields["dataset_name"], str) else {}


def _stores(source: FrameworkOptions, values: PythonValues, start: ast.Call) -> None:
    """Fields that the script sets after it created the configuration: ``args.learning_rate = 1e-5``."""
    for node in ast.walk(values.tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Attribute) and values.node(target.value) is start:
                name, location = target.attr, f"{values.location}, line {node.lineno}"
                runs = node in values.tree.body or node in values.functions
                if runs or name in values.settings or not _decides(source, name):
                    _take_argument(source, values, name, node.value, location)
                else:
                    source.problems.append(f"{location}: {ast.unparse(node)} may not run. Give --set {name}=VALUE")
