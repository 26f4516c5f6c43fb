"""From OpenRLHF's entry points. ``openrlhf.toml`` holds the options; here are those whose values are computed."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

from rlhf_cli.migrate.draft import Draft
from rlhf_cli.migrate.rows import Given, Source, matching, rows_of, table, value_of
from rlhf_cli.migrate.shell import Word, known_text

NAME = "OpenRLHF"
FACTS = "The facts are those of its public versions 0.5 to 0.11.2; older names stand below the name."
GROUP_TITLES = {
    "all": "All entry points",
    "rl": "train_ppo_ray",
    "supervised": "train_sft, train_rm, train_dpo, train_kto and train_kd",
    "demonstrations": "train_sft, train_kto and train_kd",
    "pairs": "train_rm and train_dpo",
    "reward_model": "train_rm",
    "reference": "train_dpo and train_kto",
    "dpo": "train_dpo",
    "kto": "train_kto",
    "kd": "train_kd",
}
"""{group of the table: its heading in the documentation}."""
ENTRY = re.compile(r"(?:^|.*/)openrlhf[./]cli[./](\w+?)(?:\.py)?")
GROUPS: Mapping[str, Sequence[str]] = {
    "rl": ("all", "rl"),
    "sft": ("all", "supervised", "demonstrations"),
    "rm": ("all", "supervised", "pairs", "reward_model"),
    "dpo": ("all", "supervised", "pairs", "reference", "dpo"),
    "kto": ("all", "supervised", "demonstrations", "reference", "kto"),
    "kd": ("all", "supervised", "demonstrations", "kd"),
}
"""{entry point: groups of the table}."""
ENTRIES = {"train_ppo_ray": "rl", **{f"train_{name}": name for name in GROUPS if name != "rl"}}
OTHERS = {
    "train_ppo": "it was removed from OpenRLHF; its options are not those of train_ppo_ray",
    "train_prm": "its rows mark steps by a token; `rlhf explain algorithm --algo prm` and the page about data say how "
    "the algorithm prm reads steps",
    "serve_rm": "it serves a reward model: rlhf serve-reward MODEL",
    "lora_combiner": "it merges an adapter: a run exports merged models",
    "batch_inference": "rlhf generate and rlhf score do its work",
}
WITHOUT: Mapping[str, str] = {
    "critic": "only with the estimator gae, which has a critic",
    "critic_muon": "only with critic.optim muon",
    "critic_min_lr": "only with a critic and the schedule cosine_with_min_lr",
    "reference": "no reference model is loaded, because algo.kl.init_coef is 0",
    "adaptive_kl": "only with algo.kl.target",
    "whitening": "only the estimators gae, reinforce and reinforce_baseline normalise over the batch",
    "ppo_loss": "not with policy_loss_type gspo",
    "correction": "no importance correction is on",
    "filter": "only with algo.dynamic_filtering_enable",
    "lora": "only with ds.lora.rank",
    "muon": "only with muon",
    "min_lr": "only with the schedule cosine_with_min_lr",
    "reward_model": "only with a reward model that no reward.remote_url or agent replaces",
    "overlong": "only with reward.overlong_buffer_len",
    "dynamic_batch": "only with train.dynamic_batch_enable",
    "ema": "only with train.enable_ema",
    "async": "only with train.async_enable",
    "images": "only with data.max_images_per_prompt",
    "eval": "only with eval.dataset",
    "wandb": "only with logger.wandb.key",
}
"""{condition of a row: what is missing without it}."""
ALGORITHMS = {
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}
SUPERVISED = {"sft": "sft", "rm": "reward_model", "dpo": "dpo", "kto": "kto", "kd": "distill"}
SCHEDULES = {
    "cosine_with_min_lr": "cosine_with_min",
    "constant_with_warmup": "constant",
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "inverse_sqrt": "inverse_sqrt",
}
CORRECTIONS = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask_tis"}
OF_LEVEL = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq_mask_tis"}
NO_LIMIT = 100_000_000


def read(entry: str, words: Sequence[Word], where: str) -> Source:
    """The options of a command. Raises ConfigError, with the line, for one that is unknown or cannot be read."""
    if entry not in ENTRIES:
        reason = OTHERS.get(entry, f"known are {', '.join(ENTRIES)}")
        raise ConfigError(f"{where}, line {words[0].line if words else 1}: openrlhf.cli.{entry}: {reason}")
    groups = table("openrlhf")
    source = Source(rows_of(groups, GROUPS[ENTRIES[entry]]), ENTRIES[entry], NAME)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        here = f"{where}, line {word.line}"
        flag, _, text = known_text(word, where).partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{here}: {flag!r} is not an option and belongs to none")
        values = [text] if "=" in word.text else []
        while rest and not rest[0].text.startswith("--") and "=" not in word.text:
            values.append(known_text(rest.pop(0), where))
        for row in matching(source.rows, flag.removeprefix("--"), here, groups):
            shown = ["..."] if row.secret and values else values
            source.given[row.name] = Given(value_of(row, values, here), " ".join([flag, *shown]), here)
    return source


def convert(source: Source) -> Draft:
    """The run file for these options. Raises ConfigError for a value that has no counterpart."""
    draft = Draft(source)
    online = source.entry == "rl"
    draft.take(_conditions(source), WITHOUT)
    _algorithm(draft) if online else draft.set("algorithm.use", SUPERVISED[source.entry])
    _data(draft, online)
    _trainer(draft, "", "actor." if online else "")
    _run(draft, online)
    if online:
        _loss(draft)
        _rewards(draft)
        _sampling(draft)
        _placement(draft)
    else:
        _supervised(draft)
    draft.set("launcher.use", "ray")
    draft.set("trainer.use", "deepspeed")
    return draft


def _conditions(s: Source) -> set[str]:
    correction = s["algo.advantage.is_correction_enable"] or s["use_icepop"]
    correction = correction or s["algo.advantage.is_correction_level"] not in ("off", None)
    critic = s["algo.advantage.estimator"] == "gae"
    scheduler = "actor.lr_scheduler" if s.entry == "rl" else "lr_scheduler"
    checks = {
        "critic": critic,
        "critic_muon": critic and s["critic.optim"] == "muon",
        "critic_min_lr": critic and s["critic.lr_scheduler"] == "cosine_with_min_lr",
        "reference": bool(s["algo.kl.init_coef"]),
        "adaptive_kl": bool(s["algo.kl.init_coef"]) and s["algo.kl.target"] is not None,
        "whitening": s["algo.advantage.estimator"] in ("gae", "reinforce", "reinforce_baseline"),
        "ppo_loss": s["actor.policy_loss_type"] == "ppo",
        "correction": bool(correction) and s["actor.policy_loss_type"] == "ppo",
        "filter": bool(s["algo.dynamic_filtering_enable"]),
        "lora": bool(s["ds.lora.rank"]),
        "muon": "muon" in (s["actor.optim"], s["optim"]),
        "min_lr": s[scheduler] == "cosine_with_min_lr",
        "reward_model": bool(s["reward.model_name_or_path"]) and not _scored_outside(s),
        "overlong": s["reward.overlong_buffer_len"] is not None,
        "dynamic_batch": bool(s["train.dynamic_batch_enable"]),
        "ema": bool(s["train.enable_ema"]),
        "async": bool(s["train.async_enable"]),
        "images": bool(s["data.max_images_per_prompt"]),
        "eval": bool(s["eval.dataset"]),
        "wandb": "logger.wandb.key" in s.given,
    }
    return {name for name, holds in checks.items() if holds}


def _scored_outside(s: Source) -> bool:
    return bool(s["reward.remote_url"] or s["train.agent_func_path"])


# ------------------------------------------------------------------------------------------ algorithm


def _algorithm(draft: Draft) -> None:
    s = draft.source
    estimator = s["algo.advantage.estimator"]
    if estimator not in ALGORITHMS:
        raise s.refused("algo.advantage.estimator", f"there is no counterpart; known are {', '.join(ALGORITHMS)}")
    draft.set("algorithm.use", ALGORITHMS[estimator], "algo.advantage.estimator")
    if estimator == "dr_grpo":
        note = "the advantage of Dr. GRPO; OpenRLHF keeps the mean over tokens"
        draft.set("algorithm.advantage.std", "none", "algo.advantage.estimator", note=note)
    if estimator in ("gae", "reinforce"):
        draft.set("algorithm.advantage.gamma", s["algo.advantage.gamma"], "algo.advantage.gamma")
    else:
        draft.unread["algo.advantage.gamma"] = f"1 with {estimator} in OpenRLHF, and the default here too"
    if s["algo.advantage.no_std_norm"] and estimator in ("gae", "reinforce", "reinforce_baseline"):
        draft.set("algorithm.advantage.normalise", "center", "algo.advantage.no_std_norm")
    samples, size = s["rollout.batch_size"] * s["rollout.n_samples_per_prompt"], s["train.batch_size"]
    names = ("rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size")
    if size < 1 or samples % size:
        raise s.refused(
            "train.batch_size",
            f"a rollout batch has {s['rollout.batch_size']} prompts x {s['rollout.n_samples_per_prompt']} samples = "
            f"{samples}, which is not a whole number of optimizer steps of {size} samples. Change one of the three.",
        )
    note = f"{samples} samples in optimizer steps of {size}"
    draft.set("algorithm.minibatches", samples // size, *names[::-1], note=note)
    draft.set("algorithm.epochs", s["train.max_epochs"], "train.max_epochs")
    draft.set(
        "policy.gradient_checkpointing", s["actor.gradient_checkpointing_enable"], "actor.gradient_checkpointing_enable"
    )
    if estimator == "gae":
        steps = s["critic.freezing_steps"] + 1
        draft.set("algorithm.critic_warmup", max(steps, 0), "critic.freezing_steps", note="N freezes N + 1 steps")
        model = s["critic.model_name_or_path"] or _critic_model(s)
        draft.set("critic.model", model, "critic.model_name_or_path")
        checkpointing = "actor.gradient_checkpointing_enable"
        draft.set("critic.gradient_checkpointing", s[checkpointing], checkpointing)
        _trainer(draft, "critic.", "critic.")
    _kl(draft)


def _critic_model(s: Source) -> Any:
    reward_model = s["reward.model_name_or_path"]
    return reward_model.split(",")[0] if reward_model and not s["reward.remote_url"] else s["actor.model_name_or_path"]


def _kl(draft: Draft) -> None:
    s = draft.source
    if not s["algo.kl.init_coef"]:
        return
    estimator = "k3" if s["use_kl_estimator_k3"] else s["algo.kl.estimator"]
    names = ["algo.kl.estimator"] + (["use_kl_estimator_k3"] if "use_kl_estimator_k3" in s.given else [])
    if s["algo.kl.use_loss"] and estimator == "k1":
        raise s.refused(
            "algo.kl.estimator",
            "k1 as a loss has zero expected gradient, so it regularises nothing. Give --algo.kl.estimator k2 or k3, or "
            "--algo.kl.init_coef 0",
        )
    default = "k3" if s["algo.kl.use_loss"] else "k1"
    if estimator != default:
        draft.set("algorithm.kl.estimator", estimator, *names)
    else:
        draft.unread |= dict.fromkeys(names, f"algorithm.kl.estimator is {default} by default here too")
    if s["algo.kl.unbiased_gradient"]:
        if not s["algo.kl.use_loss"] or estimator != "k3":
            raise s.refused("algo.kl.unbiased_gradient", "it is known for k3 as a loss only")
        draft.set("algorithm.kl.unbiased", True, "algo.kl.unbiased_gradient")


def _loss(draft: Draft) -> None:
    s = draft.source
    both = s["actor.eps_clip_low_high"]
    names = ("actor.eps_clip_low_high",) if both else ("actor.eps_clip",)
    low, high = both or (s["actor.eps_clip"], s["actor.eps_clip"])
    draft.set("algorithm.loss.clip_low", low, *names)
    draft.set("algorithm.loss.clip_high", high, *names)
    if both:
        draft.unread["actor.eps_clip"] = "actor.eps_clip_low_high is set"
    if s["actor.policy_loss_type"] == "ppo":
        modes = {"token-mean": "token_mean", "seq-mean-token-mean": "seq_mean_token_mean"}
        if s["actor.loss_agg_mode"] not in modes:
            raise s.refused("actor.loss_agg_mode", f"there is no counterpart; known are {', '.join(modes)}")
        draft.set("algorithm.loss.aggregation", modes[s["actor.loss_agg_mode"]], "actor.loss_agg_mode")
        _correction(draft)
    if s["train.enable_ema"]:
        where = "policy.trainer" if s["algo.advantage.estimator"] == "gae" else "trainer"
        draft.set(f"{where}.ema_decay", s["train.ema_beta"], "train.ema_beta", "train.enable_ema")


def _correction(draft: Draft) -> None:
    s = draft.source
    level, mode = s["algo.advantage.is_correction_level"], s["algo.advantage.is_correction_mode"]
    enabled = s["algo.advantage.is_correction_enable"] or s["use_icepop"]
    if level != "off":
        if (level, mode) not in OF_LEVEL or s["algo.advantage.is_correction_gating"] != "ratio":
            gating = s["algo.advantage.is_correction_gating"]
            raise s.refused(
                "algo.advantage.is_correction_level",
                f"there is no counterpart of the mode {mode} with the gating {gating} at this level; known are token "
                "with clip or mask, and seq with mask, each with the gating ratio",
            )
        names = [f"algo.advantage.is_correction_{part}" for part in ("level", "mode", "gating")]
        draft.set("algorithm.loss.correction.preset", OF_LEVEL[level, mode], *names)
    elif enabled:
        kind = "icepop" if s["use_icepop"] else s["algo.advantage.is_correction_type"]
        if kind not in CORRECTIONS:
            raise s.refused("algo.advantage.is_correction_type", f"known are {', '.join(CORRECTIONS)}")
        names = [f"algo.advantage.is_correction_{part}" for part in ("enable", "type")] + ["use_icepop"]
        draft.set("algorithm.loss.correction.preset", CORRECTIONS[kind], *names)
    else:
        return
    threshold = s["algo.advantage.is_correction_threshold"]
    low, high = [0.5, 5.0] if threshold is None else [0.0, *threshold][-2:]
    draft.set("algorithm.loss.correction.low", low, "algo.advantage.is_correction_threshold")
    draft.set("algorithm.loss.correction.high", high, "algo.advantage.is_correction_threshold")


# ------------------------------------------------------------------------------------ data and rewards


def _data(draft: Draft, online: bool) -> None:
    s = draft.source
    names = ("data.prompt_dataset", "data.prompt_probs", "data.prompt_split")
    train, shares, split = names if online else ("data.dataset", "data.dataset_probs", "data.dataset_split")
    limit = s["data.max_samples"]
    if s[train]:
        sources = _sources(s, train, split)
        if s[shares]:
            numbers = [float(text) for text in s[shares].split(",")]
            if len(numbers) != len(sources):
                raise s.refused(shares, f"there are {len(sources)} data sets")
            sources = [{**source, "probability": n} for source, n in zip(sources, numbers, strict=True)]
        if limit < NO_LIMIT:
            sources = [{**source, "max_rows": limit} for source in sources]
        note = "OpenRLHF's limit holds for the sum too" if limit < NO_LIMIT and len(sources) > 1 else ""
        draft.set("data.train", sources, train, *([shares] if s[shares] else []), split, "data.max_samples", note=note)
    if s["eval.dataset"]:
        draft.set("data.eval", _sources(s, "eval.dataset", "eval.split"), "eval.dataset", "eval.split")
    chat = s["data.apply_chat_template"]
    draft.set("data.template", "chat" if chat else "plain", "data.apply_chat_template")
    draft.set("data.max_tokens", s["data.max_len"], "data.max_len")
    draft.set("data.too_long", "drop", note="longer rows are left out and counted; OpenRLHF cuts them")
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
        draft.unread["data.input_template"] = "not with a chat template, and not without {} in it"
    else:
        draft.unread["data.input_template"] = "not with a chat template, and not without a prompt's column"


def _sources(s: Source, name: str, split: str) -> list[dict[str, Any]]:
    paths = [path.strip() for path in s[name].split(",")]
    if folders := [path for path in paths if "@" in path]:
        raise s.refused(name, f"{folders[0]!r} means a folder of a data set; name the files in it instead")
    return [{"path": path} | ({"split": s[split]} if s[split] != "train" else {}) for path in paths]


def _rewards(draft: Draft) -> None:
    s = draft.source
    label = {"label": s["data.label_key"]} if s["data.label_key"] else {}
    if path := s["train.agent_func_path"]:
        if _own_executor(path):
            draft.set("rollout.use", f"file:{path}", "train.agent_func_path")
        else:
            draft.set("rollout.use", "multi_turn", "train.agent_func_path")
            draft.set("env.use", f"file:{path}", "train.agent_func_path")
            draft.set("env.prompt", s["data.input_key"], "data.input_key")
        where = "rollout" if _own_executor(path) else "env"
        for name, column in label.items():
            draft.set(f"{where}.{name}", column, "data.label_key")
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
        draft.set("reward.0.normalise", s["reward.normalize_enable"], "reward.normalize_enable")
        for option in ("dtype", "storage"):
            draft.set(f"roles.reward_model.{option}", "bf16", "ds.param_dtype")
    else:
        raise ConfigError("train_ppo_ray needs a reward: reward.remote_url, reward.model_name_or_path or an agent")
    if "data.label_key" in s.given and not any("data.label_key" in names for names in draft.causes.values()):
        draft.unread["data.label_key"] = "a reward model reads no label"


def _own_executor(path: str) -> bool:
    """Whether a file's ``AgentExecutor`` has an ``execute()`` of its own. False where the file is not here."""
    try:
        classes = [n for n in ast.parse(Path(path).read_text("utf-8")).body if isinstance(n, ast.ClassDef)]
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False
    methods = [m for c in classes if c.name == "AgentExecutor" for m in c.body]
    return any(isinstance(m, ast.AsyncFunctionDef | ast.FunctionDef) and m.name == "execute" for m in methods)


def _sampling(draft: Draft) -> None:
    s = draft.source
    prompt, answer = s["prompt_max_len"], s["generate_max_len"]
    if prompt is not None or answer is not None:  # until 0.9, each 1024 by default
        prompt, answer = prompt or 1024, answer or 1024
        draft.set("data.max_prompt_tokens", prompt, "prompt_max_len")
        draft.set("data.max_tokens", prompt + answer, "prompt_max_len", "generate_max_len")
        draft.set("sampling.max_new_tokens", answer, "generate_max_len")
    elif s["rollout.max_new_tokens"] is not None:
        answer = s["rollout.max_new_tokens"]
        if answer >= s["data.max_len"]:
            raise s.refused(
                "rollout.max_new_tokens", f"it leaves no room for a prompt within {s['data.max_len']} tokens"
            )
        draft.set("sampling.max_new_tokens", answer, "rollout.max_new_tokens")
    else:
        note = "what the prompt leaves of data.max_tokens"
        draft.set("sampling.max_new_tokens", s["data.max_len"] - 1, "data.max_len", note=note)
    if (buffer := s["reward.overlong_buffer_len"]) is not None:
        if buffer != int(buffer) or buffer < 1:
            raise s.refused("reward.overlong_buffer_len", "a whole number of tokens above 0 is needed")
        longest = answer if answer is not None else s["data.max_len"]
        draft.set("algorithm.shaping.overlong_buffer", int(buffer), "reward.overlong_buffer_len")
        draft.set("algorithm.shaping.overlong_max", longest, "rollout.max_new_tokens", "data.max_len")
    if s["algo.dynamic_filtering_enable"]:
        low, high = s["algo.dynamic_filtering_range"]
        names = ("algo.dynamic_filtering_range", "algo.dynamic_filtering_enable")
        draft.set("stream.filter.low", low, *names)
        draft.set("stream.filter.high", high, *names)
    if s["train.async_enable"]:
        draft.set("stream.mode", "continuous", "train.async_enable")
        if s["train.partial_rollout_enable"]:
            draft.set("sync.in_flight", "continue", "train.partial_rollout_enable")
            draft.set("sync.keys", "keep", "train.partial_rollout_enable")
        else:
            note = "weights wait for unfinished answers, as without train.partial_rollout_enable"
            draft.set("sync.in_flight", "drain", "train.async_enable", note=note)
    if s["data.max_images_per_prompt"]:
        draft.set("data.max_images", s["data.max_images_per_prompt"], "data.max_images_per_prompt")
    if s["train.dynamic_batch_enable"]:
        draft.set(
            "policy.micro_tokens",
            s["train.max_tokens_per_gpu"],
            "train.max_tokens_per_gpu",
            "train.dynamic_batch_enable",
        )
    if s["eval.dataset"]:
        best = s["ckpt.best_metric_key"]
        if best == "none":
            draft.set("checkpoint.save_best", False, "ckpt.best_metric_key")
            draft.set("checkpoint.export_best", False, "ckpt.best_metric_key")
        elif best:
            raise s.refused("ckpt.best_metric_key", "metrics have other names here; choose one by --eval.metric")
        else:
            draft.set("eval.metric", "reward", note="OpenRLHF's pass1 is the mean reward")


# ------------------------------------------------------------------------------------ trainer and run


def _trainer(draft: Draft, ours: str, theirs: str) -> None:
    """Schedule, warm-up and clipping of a role."""
    s = draft.source
    name = s[f"{theirs}lr_scheduler"]
    if name not in SCHEDULES:
        raise s.refused(f"{theirs}lr_scheduler", f"there is no counterpart; known are {', '.join(SCHEDULES)}")
    draft.set(f"{ours}trainer.schedule", SCHEDULES[name], f"{theirs}lr_scheduler")
    if name == "constant":
        draft.set(f"{ours}trainer.warmup_ratio", 0.0, f"{theirs}lr_warmup_ratio", note="constant has no warm-up")
    else:
        draft.set(f"{ours}trainer.warmup_ratio", s[f"{theirs}lr_warmup_ratio"], f"{theirs}lr_warmup_ratio")
    clip = s[f"{theirs}max_norm"]
    note = "" if clip > 0 else "no clipping"
    draft.set(f"{ours}trainer.max_grad_norm", clip if clip > 0 else 1e9, f"{theirs}max_norm", note=note)


def _run(draft: Draft, online: bool) -> None:
    s = draft.source
    if s["ds.param_dtype"] != "bf16":
        raise s.refused("ds.param_dtype", "fp16 is not offered; give bf16")
    for role in ("policy", *(["critic"] if s["algo.advantage.estimator"] == "gae" else [])):
        for option in ("dtype", "storage"):
            draft.set(f"{role}.{option}", "bf16", "ds.param_dtype")
    if s["ds.lora.rank"]:
        draft.set("trainer.lora.rank", s["ds.lora.rank"], "ds.lora.rank")
        targets = s["ds.lora.target_modules"]
        if targets and targets != ["all-linear"]:
            draft.set("trainer.lora.targets", targets, "ds.lora.target_modules")
    if "ckpt.output_dir" in s.given:
        draft.set("run.output", s["ckpt.output_dir"], "ckpt.output_dir")
    every = s["ckpt.save_steps"]
    if every > 0:
        draft.set("checkpoint.every", every, "ckpt.save_steps")
        if s["ckpt.save_hf"]:
            draft.set("checkpoint.export_every", every, "ckpt.save_hf", "ckpt.save_steps")
    if s["eval.dataset"] and s["eval.steps"] > 0:
        draft.set("eval.every", s["eval.steps"], "eval.steps")
    if "logger.wandb.key" in s.given:
        draft.set("observer.0.use", "wandb", "logger.wandb.key", note="the key belongs into WANDB_API_KEY")
        for ours, theirs in {"project": "project", "entity": "org", "group": "group"}.items():
            if s[f"logger.wandb.{theirs}"]:
                draft.set(f"observer.0.{ours}", s[f"logger.wandb.{theirs}"], f"logger.wandb.{theirs}")
    if s["logger.tensorboard_dir"]:
        number = 1 if "logger.wandb.key" in s.given else 0
        note = "its files are in the run's folder"
        draft.set(f"observer.{number}.use", "tensorboard", "logger.tensorboard_dir", note=note)
    if not online:
        draft.set("data.batch_size", s["train.batch_size"], "train.batch_size")
        draft.set("run.epochs", s["train.max_epochs"], "train.max_epochs")


def _supervised(draft: Draft) -> None:
    s = draft.source
    if s.entry in ("sft", "kto", "kd"):
        if s["data.multiturn"]:
            draft.set("data.loss_on", "assistant", "data.multiturn")
        if s["model.pretrain_mode_enable"]:
            draft.set("data.loss_on", "all", "model.pretrain_mode_enable")
        if not s["data.output_key"]:
            draft.values.pop("data.prompt", None)
            if not s["data.apply_chat_template"]:
                raise ConfigError(
                    f"{s.entry}: without data.output_key OpenRLHF trains on the prompt alone, which only a run with "
                    "data.loss_on = 'all' on a column `text` does here. Give --data.output_key or "
                    "--data.apply_chat_template"
                )
            draft.set("data.messages", s["data.input_key"], "data.input_key")
    elif (s["data.prompt_key"], s["data.chosen_key"], s["data.rejected_key"]) != (None, "chosen", "rejected"):
        if s["data.prompt_key"] and "data.input_template" not in draft.values:
            draft.set("data.prompt", s["data.prompt_key"], "data.prompt_key")
        for name in ("chosen", "rejected"):
            draft.set(f"data.{name}", s[f"data.{name}_key"], f"data.{name}_key")
    else:
        draft.unread |= dict.fromkeys(("data.chosen_key", "data.rejected_key"), "the usual name, which is recognised")
    if s.entry == "rm":
        kind = s["model.loss_type"]
        draft.set("algorithm.loss.loss_type", "sigmoid" if kind == "sigmoid" else "logexp", "model.loss_type")
        if s["model.margin_loss_enable"]:
            draft.set("data.margin", "margin", "model.margin_loss_enable")
    if s.entry == "dpo" and s["model.ipo_enable"]:
        draft.set("algorithm.loss.loss_type", "ipo", "model.ipo_enable")
        draft.set("algorithm.loss.ipo", "sum", "model.ipo_enable")
    if s["data.tokenizer_chat_template"]:
        raise s.refused(
            "data.tokenizer_chat_template", "save the template as a file, and name it by data.chat_template"
        )
    if s.entry == "kd":
        draft.set("algorithm.loss.alpha", s["kd_coef"], "kd_coef")
        for option in ("dtype", "storage"):
            draft.set(f"roles.teacher.{option}", "bf16", "ds.param_dtype")


def _placement(draft: Draft) -> None:
    """Ranks of the roles, and whose devices they use."""
    s = draft.source
    draft.set("generator.use", "vllm")
    roles = {"policy": "actor"}
    if s["algo.kl.init_coef"]:
        roles["reference"] = "ref"
    if s["algo.advantage.estimator"] == "gae":
        roles["critic"] = "critic"
    if s["reward.model_name_or_path"] and not _scored_outside(s):
        roles["reward_model"] = "reward"
    for role, name in roles.items():
        parts = (f"{name}.num_nodes", f"{name}.num_gpus_per_node")
        draft.set(f"placement.{role}.ranks", s[parts[0]] * s[parts[1]], *parts)
        home, cause = "", ""
        if role != "policy" and s["train.colocate_all"]:
            home, cause = "policy", "train.colocate_all"
        elif role == "reference" and s["train.colocate_actor_ref"]:
            home, cause = "policy", "train.colocate_actor_ref"
        elif role == "reward_model" and s["train.colocate_critic_reward"] and "critic" in roles:
            home, cause = "critic", "train.colocate_critic_reward"
        if home:
            draft.set(f"placement.{role}.share", home, cause)
    engines, parallel = s["vllm.num_engines"], s["vllm.tensor_parallel_size"]
    if not engines:
        raise s.refused("vllm.num_engines", "OpenRLHF generates with vLLM only; give the number of engines")
    draft.set("placement.generator.ranks", engines, "vllm.num_engines")
    draft.set("placement.generator.devices", parallel, "vllm.tensor_parallel_size")
    draft.set("generator.tensor_parallel", parallel, "vllm.tensor_parallel_size")
    if s["train.colocate_all"] and not s["train.async_enable"]:
        draft.set("placement.generator.share", "policy", "train.colocate_all")
