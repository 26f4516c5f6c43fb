"""From verl's ``main_ppo``. ``verl.toml`` holds the keys; here are those whose values are computed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

from rlhf_cli.migrate.draft import Draft, with_unique_names
from rlhf_cli.migrate.rows import FrameworkOptions, OptionRow, rows_of, table, typed
from rlhf_cli.migrate.shell import Start, known_text

NAME = "verl"
EXAMPLE = "verl.trainer.main_ppo"
ENTRY = re.compile(r"(?:.*[./])?(main_(?:ppo|dapo|grpo)\w*?)(?:\.py)?")
OWN_ENTRY = re.compile(
    r"(?:.*/)?(?:verl[./]trainer[./]|recipe[./]dapo[./](?:src[./])?)(main_ppo|main_ppo_v0|main_ppo_sync|main_dapo)(?:\.py)?"
)
OWN_CONFIGS = ("ppo_trainer", "dapo_trainer")
"""Configurations whose defaults are in the table."""
ACTOR, ROLLOUT, OPTIM = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.optim"
ADVANTAGES = ("remax", "opo")
"""Estimators that correspond to advantages of ``grpo``."""
OF_GROUPS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "reinforce_plus_plus_baseline", "opo")


def read(start: Start) -> FrameworkOptions:
    """The overrides of a command, and the file of its ``--config-name``. Items that cannot be read are recorded as
    problems."""
    groups, script = table("verl"), start.script
    source = FrameworkOptions(NAME, groups, rows_of(groups, ("main_ppo",)), start.entry)
    source.origin = f"{start.entry} ({start.location})"
    if not OWN_ENTRY.fullmatch(start.word):
        source.remarks.append(
            f"{start.word} is not verl's own entry point: only its keys are read; check its code for more"
        )
    rest, overrides, file = list(start.options), list[tuple[str, str, str]](), dict[str, str]()
    while rest:
        word = rest.pop(0)
        location = f"{script}, line {word.line}"
        with source.reading():
            key, equals, text = known_text(word, script).partition("=")
            if key in ("--config-path", "--config-name"):
                file[key] = text if equals or not rest else known_text(rest.pop(0), script)
            elif not equals or key.startswith(("-", "~")):
                raise ConfigError(f"{location}: {word.text!r} is not a KEY=VALUE of main_ppo's own configuration")
            else:
                overrides.append((key.lstrip("+"), text, location))
    with source.reading():
        name = file.get("--config-name", "ppo_trainer").removesuffix(".yaml")
        if "megatron" in name:
            raise ConfigError(f"{script}: --config-name {name}: the configurations for Megatron are not read")
        if name == "dapo_trainer":
            source.entry = "main_dapo"
        if name not in OWN_CONFIGS:
            overrides = [*_of_config(Path(file.get("--config-path", "."), f"{name}.yaml")), *overrides]
    for key, text, location in overrides:
        source.give(key, text, f"{key}={text}", location, _value)
    return source


def _value(row: OptionRow, text: str, location: str) -> Any:
    import yaml

    try:
        return typed(row, yaml.safe_load(text), location)
    except yaml.YAMLError as error:
        raise ConfigError(f"{location}: the value of {row.name} cannot be read: {error}") from None


def _of_config(file: Path) -> Iterator[tuple[str, str, str]]:
    """The keys of a configuration that changes verl's own, as overrides."""
    import yaml

    try:
        fields = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--config-name {file.stem}: it is not one of {', '.join(OWN_CONFIGS)}, and {file} cannot be read: {error}"
        ) from None
    flat = dict(_flat(fields if isinstance(fields, dict) else {}, ""))
    for key, value in flat.items():
        inner = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        value = flat.get(inner[1], value) if inner else value
        if isinstance(value, str) and "${" in value:
            raise ConfigError(f"{file}: {key}: {value} is not resolved; write its value")
        # PyYAML ends a single value with a line of dots.
        yield key, yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip(), str(file)


def _flat(fields: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        elif prefix or name not in ("defaults", "hydra"):
            yield f"{prefix}{name}", value


def convert(source: FrameworkOptions) -> Draft:
    """The run file for these keys. Raises ConfigError for a value that has no counterpart."""
    draft = Draft(source)
    draft.take(conditions(source))
    updates = _algorithm(draft)
    _trainer(draft, updates)
    _data(draft)
    _run(draft)
    _placement(draft)
    return draft


def conditions(s: FrameworkOptions) -> dict[str, tuple[Any, str]]:
    """{condition of a row: (whether the run meets it, why an option has no effect without it)}."""
    critic = s["algorithm.adv_estimator"] == "gae"
    loss = s[f"{ACTOR}.policy_loss.loss_mode"]
    kl_loss = s[f"{ACTOR}.use_kl_loss"] and s[f"{ACTOR}.kl_loss_coef"]
    kl_reward = s["algorithm.use_kl_in_reward"] and s["algorithm.kl_ctrl.kl_coef"]
    adaptive_kl = kl_reward and s["algorithm.kl_ctrl.type"] == "adaptive"
    aggregation = loss not in ("gspo", "sapo", "geo_mean")
    critic_lora = critic and s["critic.model.lora_rank"]
    return {
        "critic": (critic, "only with the estimator gae, which has a critic"),
        "grpo": (s["algorithm.adv_estimator"] in ("grpo", "grpo_vectorized"), "only with the estimator grpo"),
        "kl_loss": (kl_loss, "only with use_kl_loss and a coefficient"),
        "kl_reward": (kl_reward, "only with use_kl_in_reward and a coefficient"),
        "adaptive_kl": (adaptive_kl, "only with kl_ctrl.type adaptive"),
        "ppo_loss": (loss == "vanilla", "only with the loss vanilla"),
        "aggregation": (aggregation, "verl takes seq-mean-token-mean with this loss, and so does the run"),
        "clip_cov": (loss == "clip_cov", "only with the loss clip_cov"),
        "kl_cov": (loss == "kl_cov", "only with the loss kl_cov"),
        "lora": (s["actor_rollout_ref.model.lora_rank"], "only with lora_rank"),
        "critic_lora": (critic_lora, "only with a critic and critic.model.lora_rank"),
        "dynamic": (s[f"{ACTOR}.use_dynamic_bsz"], "only with use_dynamic_bsz"),
        "reward_model": (s["reward_model.enable"], "only with reward_model.enable"),
        "eval": (s["data.val_files"], "only with data.val_files"),
        "wandb": ("wandb" in _loggers(s), "only with the logger wandb"),
        "sapo": (loss == "sapo", "only with the loss sapo"),
        "filter_groups": (s["algorithm.filter_groups.enable"], "only with algorithm.filter_groups.enable"),
    }


def _loggers(s: FrameworkOptions) -> Sequence[str]:
    return s["trainer.logger"] if "trainer.logger" in s.user_values else ["console", "wandb"]


def _algorithm(draft: Draft) -> int:
    """Set the algorithm and its batches. Returns the number of optimizer steps per step."""
    s = draft.source
    estimator = s["algorithm.adv_estimator"]
    names = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    prompts, mini = s[names[0]], s[names[1]]
    if prompts < mini:
        mini = prompts  # one minibatch, as in versions that did not refuse it
    if mini < 1 or prompts % mini:
        raise s.refused(names[1], f"{prompts} prompts per step are not a whole number of minibatches of {mini} prompts")
    draft.set("algorithm.minibatches", prompts // mini, *names, note="both are counted in prompts")
    for name in ("ppo_mini_batch_size", "ppo_epochs"):
        if estimator == "gae" and s[f"critic.{name}"] not in (None, s[f"{ACTOR}.{name}"]):
            raise s.refused(f"critic.{name}", f"the policy has {s[f'{ACTOR}.{name}']}, and both must be equal here")
    if estimator in ADVANTAGES:
        draft.set("algorithm.advantage.use", estimator, "algorithm.adv_estimator")
    if estimator in ("gae", "reinforce_plus_plus"):
        draft.copy("algorithm.advantage.gamma", "algorithm.gamma")
    if estimator == "gae":
        aggregation = s[f"{ACTOR}.loss_agg_mode"]
        if aggregation != "token-mean" and "critic.loss_agg_mode" not in s.user_values:
            reason = (
                "verl's critic takes the same mode, but here its loss is a mean over tokens. Add "
                "critic.loss_agg_mode=token-mean to accept this"
            )
            raise s.refused(f"{ACTOR}.loss_agg_mode", reason)
        steps = max(s["trainer.critic_warmup"] - 1, 0)
        draft.set("algorithm.critic_warmup", steps, "trainer.critic_warmup", note="N freezes N - 1 steps")
        model = s["critic.model.path"] or s["actor_rollout_ref.model.path"]
        if model is not None:
            draft.set("critic.model", model, "critic.model.path")
    use, mode = draft.values["algorithm.loss.use"], s[f"{ACTOR}.policy_loss.loss_mode"]
    treatment = mode.removesuffix("_cov")
    if use == "covariance":
        draft.notes["algorithm.loss.use"] = "means and shares are those of the optimizer batch, not of a micro-batch"
        draft.set("algorithm.loss.treatment", treatment, f"{ACTOR}.policy_loss.loss_mode")
    if draft.values.get("algorithm.loss.aggregation") == "seq_sum_constant":
        name = f"{ACTOR}.loss_scale_factor" if s[f"{ACTOR}.loss_scale_factor"] else "data.max_response_length"
        draft.copy("algorithm.loss.max_length", name)
    clip = f"{ACTOR}.clip_ratio"
    for side in ("low", "high") if use != "sapo" and treatment != "kl" else ():
        name = f"{clip}_{side}" if s[f"{clip}_{side}"] is not None else clip
        bound = min(s[name], 1.0) if (use, side) == ("cispo", "low") else s[name]  # a ratio is never below 0
        draft.set(f"algorithm.loss.clip_{side}", bound, name)
        if s[clip] != s[name] and name not in s.user_values:
            draft.remarks.append(
                f"verl since 0.3 does not read {clip} where {name} is not null, and it is {s[name]} by default: the "
                f"file has that value as loss.clip_{side}"
            )
    if treatment == "kl":
        bounds = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
        draft.unread |= {f"{ACTOR}.{name}": "the loss kl_cov does not clip the ratio" for name in bounds}
    if draft.conditions >= {"kl_loss", "kl_reward"}:
        raise s.refused("algorithm.use_kl_in_reward", "use_kl_loss is also on; here the KL can be in only one place")
    if "kl_reward" in draft.conditions and estimator in OF_GROUPS:
        draft.set("algorithm.kl.before_baseline", True, "algorithm.use_kl_in_reward")
    _correction(draft)
    return int(prompts // mini * s[f"{ACTOR}.ppo_epochs"])


def _correction(draft: Draft) -> None:
    s, name = draft.source, "algorithm.rollout_correction.rollout_is"
    if s["algorithm.rollout_correction.rollout_rs"]:
        raise s.refused(
            "algorithm.rollout_correction.rollout_rs", "rlhf has no equivalent of rejection in addition to weights"
        )
    if s[name]:
        draft.set("algorithm.loss.correction.mode", "truncate", name)
        draft.set("algorithm.loss.correction.low", 0.0, name)
        draft.copy("algorithm.loss.correction.high", f"{name}_threshold")


def _trainer(draft: Draft, updates: int) -> None:
    s = draft.source
    name = f"{OPTIM}.warmup_style" if s[f"{OPTIM}.warmup_style"] else f"{OPTIM}.lr_scheduler_type"
    schedules = {"trainer": (name, f"{OPTIM}.min_lr_ratio")}
    if "critic" in draft.conditions:  # [trainer] would apply to both roles
        critic = ("critic.optim.lr_scheduler_type", "critic.optim.min_lr_ratio")
        schedules = {"policy.trainer": schedules["trainer"], "critic.trainer": critic}
    for section, (name, ratio) in schedules.items():
        schedule = s.one_of(name, {"constant": "constant", "cosine": "cosine_with_min"})
        draft.set(f"{section}.schedule", schedule, name)
        if schedule == "cosine_with_min":
            draft.set(f"{section}.min_lr_ratio", s[ratio] or 0.0, ratio)
    for path in [path for path in draft.values if path.startswith("trainer.lora.") and "critic" in draft.conditions]:
        draft.values[f"policy.{path}"], draft.causes[f"policy.{path}"] = draft.values.pop(path), draft.causes.pop(path)
    clips = {"trainer": (f"{OPTIM}.clip_grad", f"{ACTOR}.grad_clip")}
    if "critic" in draft.conditions:
        clips["critic.trainer"] = ("critic.optim.clip_grad", "critic.grad_clip")
    for section, (name, old) in clips.items():
        if old in s.user_values and name not in s.user_values:
            draft.copy(f"{section}.max_grad_norm", old)
            if s[old] != s[name]:
                draft.remarks.append(f"verl reads {old} until 0.7 only; since 0.8 it clips at {name}, 1 by default")
        else:
            draft.copy(f"{section}.max_grad_norm", name)
    steps = s[f"{OPTIM}.lr_warmup_steps"]
    if steps is not None and steps > 0:
        note = f"verl counts steps of the run, of {updates} optimizer steps each"
        draft.set("trainer.warmup_steps", steps * updates, f"{OPTIM}.lr_warmup_steps", note=note)
        if "critic" in draft.conditions:
            raise s.refused(f"{OPTIM}.lr_warmup_steps", "give the ratio if there is a critic, which has its own ratio")
    else:
        draft.copy("trainer.warmup_ratio", f"{OPTIM}.lr_warmup_steps_ratio")
    if s[f"{ACTOR}.use_dynamic_bsz"]:
        draft.copy("policy.micro_tokens", f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.use_dynamic_bsz")


def _data(draft: Draft) -> None:
    s = draft.source
    if s["actor_rollout_ref.model.custom_chat_template"]:
        raise s.refused(
            "actor_rollout_ref.model.custom_chat_template", "save it as a file, and set data.chat_template to it"
        )
    limit = s["data.train_max_samples"]
    rows = {"max_rows": limit} if limit > 0 else {}
    if s["data.train_files"]:
        names = ["data.train_files", *(["data.train_max_samples"] if rows else [])]
        draft.set("data.train", with_unique_names([{"path": path, **rows} for path in s["data.train_files"]]), *names)
    else:
        draft.remarks.append("name the data: data.train")
    if s["data.val_files"]:
        draft.set("data.eval", with_unique_names([{"path": path} for path in s["data.val_files"]]), "data.val_files")
        kwargs = (f"{ROLLOUT}.val_kwargs.temperature", f"{ROLLOUT}.val_kwargs.do_sample")
        draft.set("eval.temperature", s[kwargs[0]] if s[kwargs[1]] else 0.0, *kwargs)
        draft.set("eval.metric", "reward", note="verl's test score is the mean reward")
    prompt, answer = s["data.max_prompt_length"], s["data.max_response_length"]
    draft.set("data.max_prompt_tokens", prompt, "data.max_prompt_length")
    draft.set("sampling.max_new_tokens", answer, "data.max_response_length")
    draft.set("data.max_tokens", prompt + answer, "data.max_prompt_length", "data.max_response_length")
    if s["data.filter_overlong_prompts"]:
        draft.set("data.too_long", "drop", "data.filter_overlong_prompts")
        draft.unread["data.truncation"] = "longer rows are dropped"
    elif s["data.truncation"] == "error":
        draft.set("data.too_long", "error", "data.truncation")
    else:
        draft.set("data.too_long", "drop", "data.truncation", note="longer rows are dropped; verl truncates them")
    for name in [name for name in s.user_values if name.startswith("data.apply_chat_template_kwargs.")]:
        draft.copy(f"data.template_kwargs.{name.rpartition('.')[2]}", name)
    draft.set("sampling.top_k", max(s[f"{ROLLOUT}.top_k"], 0), f"{ROLLOUT}.top_k")
    batched = s[f"{ROLLOUT}.max_num_batched_tokens"]
    draft.set("generator.max_batched_tokens", max(batched, prompt + answer), f"{ROLLOUT}.max_num_batched_tokens")


def _run(draft: Draft) -> None:
    s = draft.source
    if s["trainer.val_only"]:
        raise s.refused("trainer.val_only", "rlhf eval evaluates a model")
    if s["trainer.total_training_steps"]:
        draft.unread["trainer.total_epochs"] = "trainer.total_training_steps is set"
    else:
        draft.copy("run.epochs", "trainer.total_epochs")
    observers = draft.observers([name for name in _loggers(s) if name != "console"], "trainer.logger")
    if "wandb" in observers:
        project = f"observer.{observers.index('wandb')}.project"
        draft.copy(project, "trainer.project_name")
    path = s["custom_reward_function.path"]
    if s["reward_model.reward_manager"] not in ("naive", "dapo"):
        raise s.refused("reward_model.reward_manager", "allowed: naive, dapo")
    kwargs = "reward.reward_kwargs.overlong_buffer_cfg"
    if s[f"{kwargs}.enable"] and s["reward_model.reward_manager"] == "dapo":
        longest = "reward.reward_kwargs.max_resp_len"
        draft.copy("algorithm.shaping.overlong_buffer", f"{kwargs}.len", f"{kwargs}.enable")
        draft.copy("algorithm.shaping.overlong_factor", f"{kwargs}.penalty_factor")
        draft.set("algorithm.shaping.overlong_max", s[longest] or s["data.max_response_length"], longest)
    if s["reward_model.enable"] and path:
        raise s.refused(
            "reward_model.enable",
            "custom_reward_function.path is also set: verl since 0.7 calls the function alone, which may ask the "
            "model; earlier versions read the model alone. Give --set reward_model.enable=false, or "
            "--set custom_reward_function.path=null",
        )
    if s["reward_model.enable"] and s["reward_model.model.path"]:
        draft.set(
            "reward.0.use", f"model:{s['reward_model.model.path']}", "reward_model.model.path", "reward_model.enable"
        )
    elif path:
        names = ("custom_reward_function.path", "custom_reward_function.name")
        draft.set("reward.0.use", f"file:{path}:{s[names[1]]}", *names)
    else:
        draft.remarks.append(
            "name the reward: verl chooses a function by the column data_source. With verl installed, use "
            "python:verl.utils.reward_score:default_compute_score"
        )


def _placement(draft: Draft) -> None:
    """All roles and the engines on the same devices, as in verl's main_ppo."""
    s = draft.source
    names = ("trainer.nnodes", "trainer.n_gpus_per_node")
    ranks, parallel = s[names[0]] * s[names[1]], s.positive(f"{ROLLOUT}.tensor_model_parallel_size")
    if ranks % parallel:
        raise s.refused(f"{ROLLOUT}.tensor_model_parallel_size", f"it does not divide the {ranks} GPUs")
    draft.set("launcher.use", "ray")
    if s[f"{ROLLOUT}.name"] == "sglang":
        servers = "runs do not start SGLang engines; the generator sglang_server uses servers that are already running"
        draft.notes["generator.use"] = servers
    draft.set("placement.policy.ranks", ranks, *names)
    roles = {"reference": {"kl_loss", "kl_reward"}, "critic": {"critic"}, "reward_model": {"reward_model"}}
    for role in (name for name, conditions in roles.items() if conditions & draft.conditions):
        draft.set(f"placement.{role}.ranks", ranks, *names)
        draft.set(f"placement.{role}.share", "policy")
    draft.set("placement.generator.ranks", ranks // parallel, *names, f"{ROLLOUT}.tensor_model_parallel_size")
    draft.set("placement.generator.share", "policy")
