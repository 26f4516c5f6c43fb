"""From OpenRLHF's entry points. ``openrlhf.toml`` holds the options; here are those whose values are computed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import ConfigError

from rlhf_cli.migrate.draft import INVERSE_SQRT, Draft
from rlhf_cli.migrate.openrlhf_data import rewards, rows_of_data, supervised
from rlhf_cli.migrate.rows import FrameworkOptions, rows_of, table, value_of
from rlhf_cli.migrate.shell import Start, flags

NAME = "OpenRLHF"
EXAMPLE = "openrlhf.cli.train_ppo_ray"
ENTRY = re.compile(r"(?:.*/)?(?:\w*rlhf[./]cli[./](\w+?)|(train_(?:ppo_ray|sft|rm|dpo|kto|kd)))(?:\.py)?")
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
REFUSED_ENTRIES = {
    "train_ppo": "it was removed from OpenRLHF; its options are not those of train_ppo_ray",
    "train_prm": "its rows mark steps by a token; `rlhf explain algorithm --algo prm` and the page about data say how "
    "the algorithm prm reads steps",
    "serve_rm": "it serves a reward model: rlhf serve-reward MODEL",
    "lora_combiner": "it merges an adapter: a run exports merged models",
    "batch_inference": "rlhf generate and rlhf score do its work",
}
SUPERVISED = {"sft": "sft", "rm": "reward_model", "dpo": "dpo", "kto": "kto", "kd": "distill"}
CORRECTIONS = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask_tis"}
OF_LEVEL = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq_mask_tis"}


def read(start: Start) -> FrameworkOptions:
    """The options of a command. Raises ConfigError, with the line, for another entry point."""
    if start.entry not in ENTRIES:
        reason = REFUSED_ENTRIES.get(start.entry, f"allowed: {', '.join(ENTRIES)}")
        raise ConfigError(f"{start.location}: openrlhf.cli.{start.entry}: {reason}")
    groups, entry = table("openrlhf"), ENTRIES[start.entry]
    source = FrameworkOptions(NAME, groups, rows_of(groups, GROUPS[entry]), entry)
    for flag in flags(start.options, start.script, source.problems):
        source.give(flag.name, flag.texts, flag.text, flag.location, value_of)
    source.origin = f"{start.entry} ({start.location})"
    return source


def convert(source: FrameworkOptions) -> Draft:
    """The run file for these options. Raises ConfigError for a value that has no counterpart."""
    draft = Draft(source)
    online = source.entry == "rl"
    draft.take(conditions(source))
    _algorithm(draft) if online else draft.set("algorithm.use", SUPERVISED[source.entry])
    rows_of_data(draft, online)
    _trainer(draft, "", "actor." if online else "")
    _run(draft, online)
    if online:
        _loss(draft)
        rewards(draft)
        _sampling(draft)
        _placement(draft)
    else:
        supervised(draft)
    _offloading(draft)
    draft.set("launcher.use", "ray")
    draft.set("trainer.use", "deepspeed")
    return draft


def conditions(s: FrameworkOptions) -> dict[str, tuple[Any, str]]:
    """{condition of a row: (whether the run meets it, why an option has no effect without it)}."""
    correction = s["algo.advantage.is_correction_enable"] or s["use_icepop"]
    correction = correction or s["algo.advantage.is_correction_level"] not in ("off", None)
    estimator, kl = s["algo.advantage.estimator"], s["algo.kl.init_coef"]
    critic = estimator == "gae"
    critic_min_lr = critic and s["critic.lr_scheduler"] == "cosine_with_min_lr"
    whitening = estimator in ("gae", "reinforce", "reinforce_baseline")
    ppo_loss = s["actor.policy_loss_type"] == "ppo"
    min_lr = s["actor.lr_scheduler" if s.entry == "rl" else "lr_scheduler"] == "cosine_with_min_lr"
    reward_model = s["reward.model_name_or_path"] and not (s["reward.remote_url"] or s["train.agent_func_path"])
    return {
        "critic": (critic, "only with the estimator gae, which has a critic"),
        "critic_min_lr": (critic_min_lr, "only with a critic and the schedule cosine_with_min_lr"),
        "reference": (kl, "no reference model is loaded, because algo.kl.init_coef is 0"),
        "adaptive_kl": (kl and s["algo.kl.target"] is not None, "only with algo.kl.target"),
        "whitening": (whitening, "only the estimators gae, reinforce and reinforce_baseline normalise over the batch"),
        "ppo_loss": (ppo_loss, "not with policy_loss_type gspo"),
        "correction": (correction and ppo_loss, "no importance correction is on"),
        "filter": (s["algo.dynamic_filtering_enable"], "only with algo.dynamic_filtering_enable"),
        "lora": (s["ds.lora.rank"], "only with ds.lora.rank"),
        "min_lr": (min_lr, "only with the schedule cosine_with_min_lr"),
        "reward_model": (reward_model, "only with a reward model that no reward.remote_url or agent replaces"),
        "overlong": (s["reward.overlong_buffer_len"] is not None, "only with reward.overlong_buffer_len"),
        "dynamic_batch": (s["train.dynamic_batch_enable"], "only with train.dynamic_batch_enable"),
        "ema": (s["train.enable_ema"], "only with train.enable_ema"),
        "async": (s["train.async_enable"], "only with train.async_enable"),
        "images": (s["data.max_images_per_prompt"], "only with data.max_images_per_prompt"),
        "eval": (s["eval.dataset"], "only with eval.dataset"),
        "wandb": ("logger.wandb.key" in s.user_values, "only with logger.wandb.key"),
    }


# ------------------------------------------------------------------------------------------ algorithm


def _algorithm(draft: Draft) -> None:
    s = draft.source
    estimator = s["algo.advantage.estimator"]
    if estimator == "dr_grpo":
        note = "the advantage of Dr. GRPO; OpenRLHF keeps the mean over tokens"
        draft.set("algorithm.advantage.std", "none", "algo.advantage.estimator", note=note)
    if estimator == "flash_reinforce":
        draft.set("algorithm.advantage.use", "batch_mean", "algo.advantage.estimator")
        if s["algo.advantage.gamma"] != 1:
            raise s.refused("algo.advantage.gamma", "with flash_reinforce it must be 1")
    if estimator in ("gae", "reinforce"):
        draft.copy("algorithm.advantage.gamma", "algo.advantage.gamma")
    else:
        draft.unread["algo.advantage.gamma"] = f"1 with {estimator} in OpenRLHF, and the default here too"
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
    draft.copy("algorithm.epochs", "train.max_epochs")
    draft.copy("policy.gradient_checkpointing", "actor.gradient_checkpointing_enable")
    if estimator == "gae":
        steps = s["critic.freezing_steps"] + 1
        draft.set("algorithm.critic_warmup", max(steps, 0), "critic.freezing_steps", note="N freezes N + 1 steps")
        model = s["critic.model_name_or_path"] or _critic_model(s)
        if model is not None:
            draft.set("critic.model", model, "critic.model_name_or_path")
        checkpointing = "actor.gradient_checkpointing_enable"
        draft.copy("critic.gradient_checkpointing", checkpointing)
        _trainer(draft, "critic.", "critic.")
    _kl(draft)


def _critic_model(s: FrameworkOptions) -> Any:
    reward_model = s["reward.model_name_or_path"]
    return reward_model.split(",")[0] if reward_model and not s["reward.remote_url"] else s["actor.model_name_or_path"]


def _kl(draft: Draft) -> None:
    s = draft.source
    if "reference" not in draft.conditions:
        return
    estimator = "k3" if s["use_kl_estimator_k3"] else s["algo.kl.estimator"]
    names = ["algo.kl.estimator"] + (["use_kl_estimator_k3"] if "use_kl_estimator_k3" in s.user_values else [])
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
            raise s.refused("algo.kl.unbiased_gradient", "it is supported only with k3 as a loss")
        draft.set("algorithm.kl.unbiased", True, "algo.kl.unbiased_gradient")


def _loss(draft: Draft) -> None:
    s = draft.source
    bounds = s["actor.eps_clip_low_high"]
    if bounds and len(bounds) != 2:
        raise s.refused("actor.eps_clip_low_high", "it takes two numbers, LOW and HIGH")
    names = ("actor.eps_clip_low_high",) if bounds else ("actor.eps_clip",)
    low, high = bounds or 2 * [s["actor.eps_clip"]]
    draft.set("algorithm.loss.clip_low", low, *names)
    draft.set("algorithm.loss.clip_high", high, *names)
    if bounds:
        draft.unread["actor.eps_clip"] = "actor.eps_clip_low_high is set"
    if s["actor.policy_loss_type"] == "ppo":
        _correction(draft)
    if s["train.enable_ema"]:
        section = "policy.trainer" if "critic" in draft.conditions else "trainer"
        draft.copy(f"{section}.ema_decay", "train.ema_beta", "train.enable_ema")


def _correction(draft: Draft) -> None:
    s = draft.source
    level, mode = s["algo.advantage.is_correction_level"], s["algo.advantage.is_correction_mode"]
    enabled = s["algo.advantage.is_correction_enable"] or s["use_icepop"]
    if level != "off":
        gating = s["algo.advantage.is_correction_gating"]
        if gating in ("binary_kl", "tv"):
            _divergence(draft, gating)
            return
        if (level, mode) not in OF_LEVEL or gating != "ratio":
            raise s.refused(
                "algo.advantage.is_correction_level",
                f"rlhf has no equivalent of the mode {mode} with the gating {gating} at this level; allowed: token "
                "with clip or mask, and seq with mask",
            )
        names = [f"algo.advantage.is_correction_{part}" for part in ("level", "mode", "gating")]
        draft.set("algorithm.loss.correction.preset", OF_LEVEL[level, mode], *names)
    elif enabled:
        kind = "icepop" if s["use_icepop"] else s["algo.advantage.is_correction_type"]
        if kind not in CORRECTIONS:
            raise s.refused("algo.advantage.is_correction_type", f"allowed: {', '.join(CORRECTIONS)}")
        names = [f"algo.advantage.is_correction_{part}" for part in ("enable", "type")] + ["use_icepop"]
        draft.set("algorithm.loss.correction.preset", CORRECTIONS[kind], *names)
    else:
        return
    threshold = s["algo.advantage.is_correction_threshold"]
    if threshold is not None and len(threshold) > 2:
        raise s.refused("algo.advantage.is_correction_threshold", "it takes HIGH, or LOW and HIGH")
    low, high = [0.5, 5.0] if threshold is None else [0.0, *threshold][-2:]
    draft.set("algorithm.loss.correction.low", low, "algo.advantage.is_correction_threshold")
    draft.set("algorithm.loss.correction.high", high, "algo.advantage.is_correction_threshold")


def _divergence(draft: Draft, gating: str) -> None:
    """A correction by a divergence, which masks values above one bound."""
    s = draft.source
    names = [f"algo.advantage.is_correction_{part}" for part in ("level", "mode", "gating", "threshold")]
    level, mode, _, threshold = (s[name] for name in names)
    levels = {"token": "token", "seq": "sequence_mean"}
    if level not in levels or mode != "mask" or not threshold or (len(threshold) > 1 and threshold[0] > 0):
        raise s.refused(names[2], f"the gating {gating} needs the level token or seq, the mode mask and one threshold")
    draft.set("algorithm.loss.correction.level", levels[level], names[0])
    draft.set("algorithm.loss.correction.mode", "mask", names[1])
    draft.set("algorithm.loss.correction.statistic", gating, names[2])
    draft.set("algorithm.loss.correction.high", threshold[-1], names[3])


# ----------------------------------------------------------------------------------------- sampling


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
        note = "the rest of data.max_tokens after the prompt"
        draft.set("sampling.max_new_tokens", s["data.max_len"] - 1, "data.max_len", note=note)
    if (buffer := s["reward.overlong_buffer_len"]) is not None:
        if buffer != int(buffer) or buffer < 1:
            raise s.refused("reward.overlong_buffer_len", "it must be a whole number of tokens above 0")
        longest = answer if answer is not None else s["data.max_len"]
        draft.set("algorithm.shaping.overlong_buffer", int(buffer), "reward.overlong_buffer_len")
        draft.set("algorithm.shaping.overlong_max", longest, "rollout.max_new_tokens", "data.max_len")
    if s["algo.dynamic_filtering_enable"]:
        if len(bounds := s["algo.dynamic_filtering_range"]) != 2:
            raise s.refused("algo.dynamic_filtering_range", "it takes two numbers, LOW and HIGH")
        low, high = bounds
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
    if s["train.dynamic_batch_enable"]:
        draft.copy("policy.micro_tokens", "train.max_tokens_per_gpu", "train.dynamic_batch_enable")
    if s["eval.dataset"]:
        best = s["ckpt.best_metric_key"]
        if best == "none":
            draft.set("checkpoint.save_best", False, "ckpt.best_metric_key")
            draft.set("checkpoint.export_best", False, "ckpt.best_metric_key")
        elif best:
            raise s.refused("ckpt.best_metric_key", "metrics have different names here; choose one with --eval.metric")
        else:
            draft.set("eval.metric", "reward", note="OpenRLHF's pass1 is the mean reward")


# ------------------------------------------------------------------------------------ trainer and run


def _trainer(draft: Draft, target: str, source: str) -> None:
    """Warm-up and clipping of a role."""
    s = draft.source
    if s[f"{source}lr_scheduler"] == "inverse_sqrt" and not s[f"{source}lr_warmup_ratio"]:
        raise s.refused(f"{source}lr_scheduler", INVERSE_SQRT)
    if s[f"{source}lr_scheduler"] == "constant":
        draft.set(f"{target}trainer.warmup_ratio", 0.0, f"{source}lr_warmup_ratio", note="constant has no warm-up")
    else:
        draft.copy(f"{target}trainer.warmup_ratio", f"{source}lr_warmup_ratio")
    clip = s[f"{source}max_norm"]
    note = "" if clip > 0 else "no clipping"
    draft.set(f"{target}trainer.max_grad_norm", clip if clip > 0 else 1e9, f"{source}max_norm", note=note)


def _run(draft: Draft, online: bool) -> None:
    s = draft.source
    if s["ds.param_dtype"] != "bf16":
        raise s.refused("ds.param_dtype", "fp16 is not supported; give bf16")
    for role in ("policy", *draft.conditions & {"critic"}):
        for option in ("dtype", "storage"):
            draft.set(f"{role}.{option}", "bf16", "ds.param_dtype")
    stage = s["ds.zero_stage"]
    note = "" if stage > 1 else "lower stages would sum gradients of micro-batches in bf16"
    draft.set("trainer.stage", max(stage, 2), "ds.zero_stage", note=note)
    if s["ckpt.save_hf"] and s["ckpt.save_steps"] > 0:
        draft.set("checkpoint.export_every", s["ckpt.save_steps"], "ckpt.save_hf", "ckpt.save_steps")
    if "logger.wandb.key" in s.user_values:
        draft.set("observer.0.use", "wandb", "logger.wandb.key", note="set the key in WANDB_API_KEY")
    if s["logger.tensorboard_dir"]:
        number = 1 if "logger.wandb.key" in s.user_values else 0
        note = "its files are in the run's folder"
        draft.set(f"observer.{number}.use", "tensorboard", "logger.tensorboard_dir", note=note)
    if not online:
        draft.copy("data.batch_size", "train.batch_size")
        draft.copy("run.epochs", "train.max_epochs")
        names = ("ds.ring_attn_size", "ds.tensor_parallel_size")
        if (ranks := s[names[0]] * s[names[1]]) > 1:
            draft.set("placement.policy.ranks", ranks, *names, note="the fewest; OpenRLHF uses every GPU")
            if s.entry == "dpo":
                draft.set("placement.reference.ranks", ranks, *names)
                draft.set("placement.reference.share", "policy")


def _offloading(draft: Draft) -> None:
    """Frozen roles whose weights are in host memory."""
    s = draft.source
    roles = {"ref.offload": "reference", "teacher_offload": "roles.teacher"}
    if "reward_model" in draft.conditions:
        roles["reward.offload"] = "roles.reward_model"
    for name, role in roles.items():
        if s[name] and (role != "reference" or s.entry != "rl" or role in draft.conditions):
            draft.set(f"{role}.trainer.offload_params", "cpu", name)
            draft.set(f"{role}.trainer.offload_optimizer", "cpu", name)
            draft.set(f"{role}.trainer.stage", 3, name)


def _placement(draft: Draft) -> None:
    """Ranks of the roles, and whose devices they use."""
    s = draft.source
    draft.set("generator.use", "vllm")
    sections = {"policy": "actor", "reference": "ref", "critic": "critic", "reward_model": "reward"}
    roles = {role: name for role, name in sections.items() if role == "policy" or role in draft.conditions}
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
    if not s["vllm.num_engines"]:
        raise s.refused("vllm.num_engines", "OpenRLHF generates with vLLM only; give the number of engines")
    if s["train.colocate_all"] and not s["train.async_enable"]:
        draft.set("placement.generator.share", "policy", "train.colocate_all")
