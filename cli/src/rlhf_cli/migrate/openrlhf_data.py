"""Rows and rewards of OpenRLHF's entry points."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

from rlhf_cli.migrate.draft import Draft, with_unique_names
from rlhf_cli.migrate.rows import FrameworkOptions

NO_LIMIT = 100_000_000
"""A limit of rows that is not written."""


def rows_of_data(draft: Draft, online: bool) -> None:
    s = draft.source
    names = ("data.prompt_dataset", "data.prompt_probs", "data.prompt_split")
    train, shares, split = names if online else ("data.dataset", "data.dataset_probs", "data.dataset_split")
    limit = s["data.max_samples"]
    if s[train]:
        sources = _sources(s, train, split)
        if s[shares]:
            try:
                numbers = [float(text) for text in s[shares].split(",")]
            except ValueError:
                raise s.refused(shares, "expected one number for each data set, separated by commas") from None
            if len(numbers) != len(sources):
                raise s.refused(shares, f"there are {len(sources)} data sets")
            sources = [{**source, "probability": n} for source, n in zip(sources, numbers, strict=True)]
        if limit < NO_LIMIT:
            sources = [{**source, "max_rows": limit} for source in sources]
        note = "OpenRLHF's limit applies to the sum too" if limit < NO_LIMIT and len(sources) > 1 else ""
        draft.set("data.train", sources, train, *([shares] if s[shares] else []), split, "data.max_samples", note=note)
    if s["eval.dataset"]:
        draft.set("data.eval", _sources(s, "eval.dataset", "eval.split"), "eval.dataset", "eval.split")
        if online and limit < NO_LIMIT:
            draft.set("eval.max_rows", limit, "data.max_samples")
    chat = s["data.apply_chat_template"]
    draft.copy("data.max_tokens", "data.max_len")
    draft.set("data.too_long", "drop", note="longer rows are dropped and counted; OpenRLHF truncates them")
    key = s["data.input_key"] if "data.input_key" in s.rows else s["data.prompt_key"]
    form = s["data.input_template"]
    if form and "{}" in form and not chat and key:
        draft.set("data.input_template", form.replace("{}", f"{{{key}}}"), "data.input_template")
        draft.causes["data.input_template"] += (
            ("data.input_key",) if "data.input_key" in s.rows else ("data.prompt_key",)
        )
        draft.values.pop("data.prompt", None)
    elif key and "data.input_key" in s.rows:
        draft.set("data.prompt", key, "data.input_key")
        draft.unread["data.input_template"] = "not used with a chat template, or without {} in it"
    else:
        draft.unread["data.input_template"] = "not used with a chat template, or without a column for the prompt"


def _sources(s: FrameworkOptions, name: str, split: str) -> list[dict[str, Any]]:
    paths = [path.strip() for path in s[name].split(",")]
    if folders := [path for path in paths if "@" in path]:
        raise s.refused(name, f"{folders[0]!r} means a folder of a data set; name the files in it instead")
    return with_unique_names([{"path": path} | ({"split": s[split]} if s[split] != "train" else {}) for path in paths])


def rewards(draft: Draft) -> None:
    s = draft.source
    label = {"label": s["data.label_key"]} if s["data.label_key"] else {}
    if path := s["train.agent_func_path"]:
        if _own_executor(path):
            draft.set("rollout.use", f"file:{path}", "train.agent_func_path")
        else:
            draft.set("rollout.use", "multi_turn", "train.agent_func_path")
            draft.set("env.use", f"file:{path}", "train.agent_func_path")
            draft.copy("env.prompt", "data.input_key")
        section = "rollout" if _own_executor(path) else "env"
        for name, column in label.items():
            draft.set(f"{section}.{name}", column, "data.label_key")
    elif url := s["reward.remote_url"]:
        if url.endswith(".py"):
            draft.set("reward.0.use", f"file:{url}", "reward.remote_url")
            draft.set("reward.0.batch", "sample", note="OpenRLHF calls the function for one sample at a time")
        else:
            draft.set("reward.0.use", "http", "reward.remote_url")
            draft.set("reward.0.urls", url.split(","), "reward.remote_url")
            draft.set("reward.0.special_tokens", True, note="as OpenRLHF sends queries")
            draft.set("reward.0.timeout", 180.0, note="OpenRLHF's")
            draft.set("reward.0.attempts", 5, note="OpenRLHF's")
            draft.set("reward.0.deadline", 910.0, note="five attempts of 180 s")
        for name, column in label.items():
            draft.set(f"reward.0.{name}", column, "data.label_key")
    elif model := s["reward.model_name_or_path"]:
        if "," in model:
            raise s.refused("reward.model_name_or_path", "OpenRLHF reads one reward model")
        draft.set("reward.0.use", f"model:{model}", "reward.model_name_or_path")
        for option in ("dtype", "storage"):
            draft.set(f"roles.reward_model.{option}", "bf16", "ds.param_dtype")
    else:
        raise ConfigError("train_ppo_ray needs a reward: reward.remote_url, reward.model_name_or_path or an agent")
    if "data.label_key" in s.user_values and not any("data.label_key" in names for names in draft.causes.values()):
        draft.unread["data.label_key"] = "a reward model does not read labels"


def _own_executor(path: str) -> bool:
    """Whether a file's ``AgentExecutor`` defines its own ``execute()``. False if the file is not on this machine."""
    try:
        classes = [n for n in ast.parse(Path(path).read_text("utf-8")).body if isinstance(n, ast.ClassDef)]
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False
    methods = [m for c in classes if c.name == "AgentExecutor" for m in c.body]
    return any(isinstance(m, ast.AsyncFunctionDef | ast.FunctionDef) and m.name == "execute" for m in methods)


def supervised(draft: Draft) -> None:
    s = draft.source
    if s.entry in ("sft", "kto", "kd"):
        if not s["data.output_key"]:
            draft.values.pop("data.prompt", None)
            if not s["data.apply_chat_template"]:
                raise ConfigError(
                    f"{s.entry}: without data.output_key OpenRLHF trains on the prompt alone. Here this needs a run "
                    "with data.loss_on = 'all' and a column `text`. Give --data.output_key or "
                    "--data.apply_chat_template"
                )
            draft.copy("data.messages", "data.input_key")
    elif (s["data.prompt_key"], s["data.chosen_key"], s["data.rejected_key"]) != (None, "chosen", "rejected"):
        if s["data.prompt_key"] and "data.input_template" not in draft.values:
            draft.copy("data.prompt", "data.prompt_key")
        for name in ("chosen", "rejected"):
            draft.copy(f"data.{name}", f"data.{name}_key")
    else:
        draft.unread |= dict.fromkeys(("data.chosen_key", "data.rejected_key"), "the usual name, which is recognised")
    if s.entry == "rm":
        kind = s["model.loss_type"]
        draft.set("algorithm.loss.loss_type", "sigmoid" if kind == "sigmoid" else "logexp", "model.loss_type")
        if kind != "sigmoid" and draft.values.pop("data.margin", None):
            names = draft.causes.pop("data.margin")
            draft.unread |= dict.fromkeys(names, "OpenRLHF's logexp does not read the margin")
    if s.entry == "dpo" and s["model.ipo_enable"]:
        draft.set("algorithm.loss.loss_type", "ipo", "model.ipo_enable")
        draft.set("algorithm.loss.ipo", "sum", "model.ipo_enable")
    if s["data.tokenizer_chat_template"]:
        raise s.refused("data.tokenizer_chat_template", "save the template as a file, and set data.chat_template to it")
    if s.entry == "kd":
        for option in ("dtype", "storage"):
            draft.set(f"roles.teacher.{option}", "bf16", "ds.param_dtype")
