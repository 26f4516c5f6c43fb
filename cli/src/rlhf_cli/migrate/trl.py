"""From TRL's trainers. ``trl.toml`` holds the fields; here are those whose values are computed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_cli.migrate.draft import INVERSE_SQRT, Draft
from rlhf_cli.migrate.rows import FrameworkOptions
from rlhf_cli.migrate.trl_data import rows_of_data

NAME = "TRL"
EXAMPLE = "grpo after trl, or grpo.py"
ENTRY = re.compile(
    r"(?:.*[/.])?(grpo|rloo|sft|dpo|reward|kto|(?:run_)?(?:grpo|gspo|rloo|sft|dpo|reward|kto)(?:_\w+)?(?=\.py))(?:\.py)?"
)
GROUPS: Mapping[str, Sequence[str]] = {
    "grpo": ("all", "model", "script", "online", "grpo"),
    "rloo": ("all", "model", "script", "online", "rloo"),
    "sft": ("all", "model", "script", "offline", "sft"),
    "dpo": ("all", "model", "script", "offline", "reference", "dpo"),
    "reward": ("all", "model", "script", "offline", "reward"),
    "kto": ("all", "model", "script", "offline", "reference", "kto"),
}
"""{trainer: groups of the table}."""
ALGORITHMS = {"grpo": "grpo", "rloo": "rloo", "sft": "sft", "dpo": "dpo", "reward": "reward_model", "kto": "kto"}
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), ""),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "its state is not paged here"),
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit", "adamw_bnb_8bit"), "with a state of 32 bits instead of 8 bits"),
}
"""{optimizer: difference to our optimizer}."""
AGGREGATIONS = {
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "grpo": "seq_mean_token_mean",
    "dr_grpo": "seq_sum_constant",
}
MEANS_OF_TOKENS = ("dapo", "bnpo", "cispo", "vespo")
"""Loss types that are a mean over the tokens of the optimizer batch."""
SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
"""Loss types of DPO that read ``label_smoothing``."""
OWN_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Rewards that TRL's script selects by name."""
PROMPT_ROOM = 2048
"""Tokens for prompts if TRL limits only answers."""


def trainer(script: str) -> str:
    """The trainer of a script by its name: ``dpo_vlm``, ``run_sft``, ``gspo``."""
    name = script.removeprefix("run_").partition("_")[0]
    return "grpo" if name == "gspo" else name


def convert(source: FrameworkOptions) -> Draft:
    """The run file for these fields. Raises ConfigError for a value that has no counterpart."""
    draft, processes = Draft(source), source.processes
    online = source.entry in ("grpo", "rloo")
    draft.take(conditions(source))
    draft.set("algorithm.use", ALGORITHMS[source.entry])
    updates = _batches(draft, processes) if online else 1
    if not online:
        rows = source["per_device_train_batch_size"] * source["gradient_accumulation_steps"] * processes
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        draft.set("data.batch_size", rows, *names, note=_processes(processes))
    _run(draft, updates)
    _trainer(draft)
    _model(draft)
    rows_of_data(draft)
    if online:
        _loss(draft) if source.entry == "grpo" else _rloo(draft, updates)
        if source["loss_type"] not in MEANS_OF_TOKENS:
            draft.notes["algorithm.mask_truncated"] = "TRL's mean over answers still counts the masked ones, as 0"
        _sampling(draft)
        _rewards(draft)
        if source["beta"] and source["sync_ref_model"]:
            _snapshots(draft, "algorithm.kl", updates)
    else:
        _offline(draft)
        if source["sync_ref_model"]:
            _snapshots(draft, "algorithm", 1)
    _placement(draft, processes, online)
    return draft


def conditions(s: FrameworkOptions) -> dict[str, tuple[Any, str]]:
    """{condition of a row: (whether the run meets it, why an option has no effect without it)}."""
    return {
        "lora": (s["use_peft"], "only with use_peft"),
        "vllm": (s["use_vllm"], "only with use_vllm"),
        "eval": (s["eval_strategy"] != "no", "only with eval_strategy"),
        "kl": (s.entry in ("grpo", "rloo") and s["beta"], "no reference model is loaded, because beta is 0"),
        "sapo": (s["loss_type"] == "sapo", "only with loss_type sapo"),
        "vespo": (s["loss_type"] == "vespo", "only with loss_type vespo"),
        "adaptive_entropy": (s["use_adaptive_entropy"], "only with use_adaptive_entropy"),
    }


def _processes(processes: int) -> str:
    return f"{processes} process" + ("es" if processes > 1 else "; --set processes=N for N")


# ------------------------------------------------------------------------------------ batches and run


def _batches(draft: Draft, processes: int) -> int:
    """Set the prompts per step and the optimizer steps per pass. Returns the total number of optimizer steps per
    step."""
    s = draft.source
    device, accumulated = s.positive("per_device_train_batch_size"), s.positive("gradient_accumulation_steps")
    group, passes = s.positive("num_generations"), s.positive("num_iterations")
    if s["generation_batch_size"] and s["steps_per_generation"]:
        raise s.refused("generation_batch_size", "steps_per_generation is set too, which TRL refuses")
    if s["generation_batch_size"] and s["generation_batch_size"] % (device * processes):
        raise s.refused("generation_batch_size", f"it is not a multiple of {device} x {processes} processes")
    generated = s["steps_per_generation"] or (s["generation_batch_size"] or 0) // (device * processes) or accumulated
    names = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"]
    names += [name for name in ("steps_per_generation", "generation_batch_size") if name in s.user_values]
    # TRL takes these statistics over one generation, even if an optimizer step has several.
    over_batch = s["scale_rewards"] == "batch" or s["multi_objective_aggregation"] == "normalize_then_sum"
    if generated % accumulated == 0:
        samples, minibatches = device * processes * generated, generated // accumulated
    elif accumulated % generated == 0 and passes == 1 and not over_batch:
        samples, minibatches = device * processes * accumulated, 1  # several generations with the same weights
    else:
        raise s.refused(
            "gradient_accumulation_steps",
            f"{generated} steps per generation in optimizer steps of {accumulated} are not supported: one must be a "
            "multiple of the other",
        )
    if samples % group:
        raise s.refused(
            "num_generations",
            f"{samples} samples per step are not a whole number of groups. TRL before 0.16 counts prompts, and unsloth "
            f"raises the batch: in these cases give per_device_train_batch_size={device * group}",
        )
    note = f"{samples} samples / {group}, {_processes(processes)}"
    draft.set("data.batch_size", samples // group, *names, note=note)
    draft.set("sampling.samples_per_prompt", group, "num_generations")
    draft.set("algorithm.minibatches", minibatches, *names)
    return int(minibatches * passes)


def _run(draft: Draft, updates: int) -> None:
    s = draft.source
    note = f"{updates} optimizer steps per step" if updates > 1 else ""
    if s["max_steps"] > 0:
        if s["max_steps"] % updates:
            raise s.refused("max_steps", f"a step here has {updates} optimizer steps; give a multiple of it")
        draft.set("run.steps", s["max_steps"] // updates, "max_steps", note=note)
        draft.unread["num_train_epochs"] = "max_steps is set"
    else:
        draft.copy("run.epochs", "num_train_epochs")
    if s["save_strategy"] == "steps":
        draft.set("checkpoint.every", _steps(draft, "save_steps", updates), "save_steps", note=note)
    if s["eval_strategy"] == "steps":
        name = "eval_steps" if s["eval_steps"] else "logging_steps"
        draft.set("eval.every", _steps(draft, name, updates), name, note=note)
    draft.observers([name for name in s["report_to"] or [] if name != "none"], "report_to")


def _steps(draft: Draft, name: str, updates: int) -> int:
    """A number of optimizer steps as steps of the run, rounded up."""
    value = draft.source[name]
    if value < 1 or value != int(value):
        raise draft.source.refused(name, "a share of the run is not supported; give a number of steps")
    return -(-int(value) // updates)


def _snapshots(draft: Draft, section: str, updates: int) -> None:
    s = draft.source
    if s["ref_model_sync_steps"] % updates:
        raise s.refused("ref_model_sync_steps", f"a step here has {updates} optimizer steps; give a multiple of it")
    names = ("ref_model_sync_steps", "sync_ref_model")
    draft.set(f"{section}.snapshot_every", s["ref_model_sync_steps"] // updates, *names)
    draft.copy(f"{section}.snapshot_share", "ref_model_mixup_alpha")


# ------------------------------------------------------------------------------------ trainer and model


def _trainer(draft: Draft) -> None:
    s = draft.source
    schedule = s["lr_scheduler_type"]
    options = dict(s["lr_scheduler_kwargs"] or {})
    if schedule == "cosine_with_min_lr":
        rate = options.pop("min_lr_rate", None)
        rate = options.pop("min_lr", 0) / s["learning_rate"] if rate is None else rate
        draft.set("trainer.min_lr_ratio", rate, "lr_scheduler_kwargs")
    if options:
        raise s.refused("lr_scheduler_kwargs", f"rlhf has no equivalent of {', '.join(options)}")
    warmup = s["warmup_steps"] or s["warmup_ratio"] or 0
    name = "warmup_steps" if s["warmup_steps"] or s["warmup_ratio"] is None else "warmup_ratio"
    if schedule == "inverse_sqrt" and not warmup:
        raise s.refused("lr_scheduler_type", INVERSE_SQRT)
    if schedule == "constant":
        draft.unread |= dict.fromkeys(("warmup_steps", "warmup_ratio"), "constant has no warm-up in TRL")
    elif warmup >= 1:
        draft.set("trainer.warmup_steps", int(warmup), name)
    else:
        draft.set("trainer.warmup_ratio", float(warmup), name)
    if difference := s.one_of("optim", OPTIMIZERS):
        draft.unread["optim"] = f"AdamW, {difference}"
    draft.set("trainer.optimizer", "adamw", "optim")
    draft.set("trainer.betas", [s["adam_beta1"], s["adam_beta2"]], "adam_beta1", "adam_beta2")
    clip = s["max_grad_norm"]
    draft.set("trainer.max_grad_norm", clip if clip > 0 else 1e9, "max_grad_norm")
    if s["train_sampling_strategy"] not in ("random", "sequential"):
        raise s.refused("train_sampling_strategy", "allowed: random, sequential")
    if s["train_sampling_strategy"] == "sequential":
        draft.set("data.shuffle", False, "train_sampling_strategy")


def _model(draft: Draft) -> None:
    s = draft.source
    if s["fp16"]:
        raise s.refused("fp16", "fp16 is not supported; give bf16")
    draft.set("policy.dtype", "fp32" if s["bf16"] is False else "bf16", "bf16")
    extra = dict(s["model_init_kwargs"] or {})
    name = "torch_dtype" if s["torch_dtype"] else "dtype"
    dtype = extra.pop("dtype", None) or extra.pop("torch_dtype", None)
    name, dtype = ("model_init_kwargs", dtype) if dtype else (name, s[name])
    extra.pop("attn_implementation", None)
    if extra.get("num_labels") == 1:
        extra.pop("num_labels")  # as every reward model has here
    for option in ("use_cache", "device_map", "low_cpu_mem_usage", "use_flash_attention_2"):
        extra.pop(option, None)  # change no result
    if "trust_remote_code" in extra:
        draft.set("policy.trust_remote_code", bool(extra.pop("trust_remote_code")), "model_init_kwargs")
    if extra:
        raise s.refused("model_init_kwargs", f"rlhf has no equivalent of {', '.join(extra)}")
    kinds = {"float32": "fp32", "bfloat16": "bf16"}
    if dtype not in kinds:
        raise s.refused(name, "allowed: float32, bfloat16")
    draft.set("policy.storage", kinds[dtype], name)
    if s["model_name_or_path"] and s["model_revision"] != "main":
        names = ("model_name_or_path", "model_revision")
        draft.set("policy.model", f"{s['model_name_or_path']}@{s['model_revision']}", *names)
    if not s["use_peft"]:
        return
    draft.copy("trainer.lora.rank", "lora_r", "use_peft")
    if s["disable_dropout"]:
        draft.set("trainer.lora.dropout", 0.0, "disable_dropout", note="TRL turns the adapters' dropout off too")
    targets = s["lora_target_modules"]
    if targets is None:
        note = "PEFT's choice for most models"
        draft.set("trainer.lora.targets", ["q_proj", "v_proj"], "lora_target_modules", note=note)
    elif targets != ["all-linear"]:
        draft.set("trainer.lora.targets", targets, "lora_target_modules")


# ---------------------------------------------------------------------------------------- algorithms


def _loss(draft: Draft) -> None:
    s = draft.source
    kind, level = s["loss_type"], s["importance_sampling_level"]
    high = s["epsilon"] if s["epsilon_high"] is None else s["epsilon_high"]
    if level == "sequence" and kind not in ("grpo", "luspo"):
        raise s.refused("loss_type", "with importance_sampling_level sequence, only grpo and luspo are allowed")
    if kind == "luspo" and (level != "sequence" or s["beta"]):
        raise s.refused("loss_type", "luspo is supported only at the level sequence, with beta 0")
    if level == "sequence":
        draft.set("algorithm.loss.use", "gspo", "importance_sampling_level")
        aggregation = "seq_mean_token_sum" if kind == "luspo" else "seq_mean_token_mean"
        draft.set("algorithm.loss.aggregation", aggregation, "loss_type")
    elif kind == "cispo":
        if high < 1:
            raise s.refused("epsilon_high", "with cispo it bounds the ratio itself, and must be at least 1")
        draft.set("algorithm.loss.use", "cispo", "loss_type")
        draft.set("algorithm.loss.clip_high", high - 1, "epsilon_high", note="the bound minus 1")
    elif kind in ("sapo", "vespo"):
        draft.copy("algorithm.loss.use", "loss_type")
    elif kind in AGGREGATIONS:
        draft.set("algorithm.loss.aggregation", AGGREGATIONS[kind], "loss_type")
        if kind == "dr_grpo":
            draft.copy("algorithm.loss.max_length", "max_completion_length", "loss_type")
    else:
        raise s.refused(
            "loss_type", f"rlhf has no equivalent; allowed: {', '.join(AGGREGATIONS)}, cispo, sapo, vespo, luspo"
        )
    if kind not in ("cispo", "sapo", "vespo"):
        draft.set("algorithm.loss.clip_low", min(s["epsilon"], 1.0), "epsilon")  # a ratio is never below 0
        draft.set("algorithm.loss.clip_high", high, "epsilon_high" if "epsilon_high" in s.user_values else "epsilon")
        if s["delta"] is not None:
            if level == "sequence" or s["delta"] <= 1 + high:
                raise s.refused("delta", "it is supported only at the level token, above 1 + epsilon_high")
            draft.copy("algorithm.loss.dual_clip", "delta")
    objectives = s["multi_objective_aggregation"]
    if objectives not in ("sum_then_normalize", "normalize_then_sum"):
        raise s.refused("multi_objective_aggregation", "allowed: sum_then_normalize, normalize_then_sum")
    scales = {"True": "group", "False": "none", "true": "group", "false": "none"}
    scale = scales.get(str(s["scale_rewards"]), s["scale_rewards"])
    if objectives == "normalize_then_sum":
        draft.set("algorithm.advantage.use", "gdpo", "multi_objective_aggregation")
    else:
        draft.set("algorithm.advantage.std", scale, "scale_rewards")
    if s["use_adaptive_entropy"] and (not s["entropy_coef"] or s["entropy_coef_min"]):
        name = "entropy_coef_min" if s["entropy_coef_min"] else "use_adaptive_entropy"
        raise s.refused(name, "the initial coefficient (entropy_coef) must be above 0, and its minimum must be 0")
    if s["entropy_coef"] and (level == "sequence" or kind not in MEANS_OF_TOKENS or s["top_entropy_quantile"] < 1):
        raise s.refused(
            "entropy_coef",
            "TRL's bonus is the mean entropy of the tokens that the loss trains on; here it is averaged like the loss, "
            f"over all tokens. Both are equal only at the level token, with the losses {', '.join(MEANS_OF_TOKENS)} "
            "and without top_entropy_quantile",
        )
    if s["beta"]:
        draft.copy("algorithm.kl.coef", "beta")
        draft.set("algorithm.kl.where", "loss", "beta")
        if s["use_bias_correction_kl"]:
            if level == "sequence":
                raise s.refused(
                    "use_bias_correction_kl", "it is supported only at the level token; give false, or beta 0"
                )
            draft.set("algorithm.kl.unbiased", True, "use_bias_correction_kl")
    if s["use_vllm"] and s["vllm_importance_sampling_correction"] and kind != "vespo":
        unit, _, mode = s["vllm_importance_sampling_mode"].partition("_")
        levels = {"token": "token", "sequence": "sequence_product"}
        if unit not in levels or mode not in ("truncate", "mask"):
            raise s.refused("vllm_importance_sampling_mode", "allowed: token or sequence, with _truncate or _mask")
        names = ("vllm_importance_sampling_mode", "vllm_importance_sampling_correction")
        draft.set("algorithm.loss.correction.level", levels[unit], *names)
        draft.set("algorithm.loss.correction.mode", mode, *names)
        cap = s["vllm_importance_sampling_cap"]
        name = "vllm_importance_sampling_clip_max" if cap is None else "vllm_importance_sampling_cap"
        draft.set(
            "algorithm.loss.correction.low",
            s["vllm_importance_sampling_clip_min"] or 0.0,
            "vllm_importance_sampling_clip_min",
        )
        draft.copy("algorithm.loss.correction.high", name)


def _rloo(draft: Draft, updates: int) -> None:
    s = draft.source
    if updates > 1:
        raise s.refused(
            "num_iterations" if s["num_iterations"] > 1 else "gradient_accumulation_steps",
            f"{updates} optimizer steps on one batch: TRL then clips one ratio per answer, which is not supported",
        )
    if s["normalize_advantages"]:
        raise s.refused("normalize_advantages", "rlhf has no equivalent")
    note = "the gradient of TRL's one ratio per answer, at the first optimizer step"
    draft.set("algorithm.loss.aggregation", "seq_mean_token_sum", note=note)
    draft.unread |= dict.fromkeys(("epsilon", "epsilon_high"), "with one optimizer step per batch nothing is clipped")
    if s["beta"]:
        draft.copy("algorithm.kl.coef", "beta")
        draft.set("algorithm.kl.before_baseline", True, "beta")


def _sampling(draft: Draft) -> None:
    s = draft.source
    if s["repetition_penalty"] != 1 or s["generation_kwargs"]:
        name = "generation_kwargs" if s["generation_kwargs"] else "repetition_penalty"
        raise s.refused(name, "samples would come from a different distribution than the one that is trained")
    answer, context = s["max_completion_length"], s["vllm_max_model_length"] if s["use_vllm"] else None
    draft.set("sampling.max_new_tokens", answer, "max_completion_length")
    if context:
        draft.set("data.max_tokens", context, "vllm_max_model_length")
    else:
        room = s["max_prompt_length"] or PROMPT_ROOM
        note = f"{room} more for prompts, which TRL does not limit" if not s["max_prompt_length"] else ""
        draft.set("data.max_tokens", answer + room, "max_completion_length", note=note)
    if s["max_prompt_length"]:
        draft.copy("data.max_prompt_tokens", "max_prompt_length")
        draft.set("data.too_long", "drop", note="longer prompts are dropped and counted; TRL truncates them")
    if s["eval_strategy"] != "no":
        draft.set("eval.samples", s["num_generations_eval"] or s["num_generations"], "num_generations_eval")
        draft.copy("eval.temperature", "temperature")


def _rewards(draft: Draft) -> None:
    s = draft.source
    uses = [(f"model:{s['reward_model_name_or_path']}", "reward_model_name_or_path")]
    uses = uses if s["reward_model_name_or_path"] else []
    names = s["reward_funcs"] or []
    weights = s["reward_weights"] or [1.0] * (len(uses) + len(names))
    if (uses or names) and len(weights) != len(uses) + len(names):
        raise s.refused("reward_weights", f"there are {len(uses) + len(names)} rewards")
    weights, functions = list(weights), list[str]()
    for name in names:
        if name == "get_soft_overlong_punishment":
            raise s.refused("reward_funcs", f"{name}: remove it; algorithm.shaping penalises long answers")
        module, _, function = name.rpartition(".")
        if module or function in OWN_REWARDS:
            uses.append((f"python:{module or 'trl.rewards'}:{function}", "reward_funcs"))
        else:
            # The weights before this position belong to the rewards in `uses`, so the weight here is this function's.
            functions.append(f"{function} (weight {weights.pop(len(uses))})")
    if functions:
        draft.remarks.append(
            f"the rewards {', '.join(functions)} are functions of the script, not of TRL: name each, as "
            "file:FILE.py:NAME"
        )
    if not uses and not functions:
        draft.remarks.append("name the rewards: a function in a file is file:FILE.py:NAME")
    for number, ((use, cause), weight) in enumerate(zip(uses, weights, strict=False)):
        draft.set(f"reward.{number}.use", use, cause)
        draft.set(f"reward.{number}.weight", weight, "reward_weights")


def _offline(draft: Draft) -> None:
    s = draft.source
    if s["max_length"]:
        draft.copy("data.max_tokens", "max_length")
    draft.set("data.too_long", "drop", note="longer rows are dropped and counted; TRL truncates them")
    if s.entry == "sft":
        if s["assistant_only_loss"]:
            draft.set("data.loss_on", "assistant", "assistant_only_loss")
        elif s["completion_only_loss"] is False:
            draft.set("data.loss_on", "all", "completion_only_loss")
        elif s["completion_only_loss"] is None:
            draft.remarks.append(
                "data.loss_on: TRL trains on the completion if rows have one, otherwise on all tokens of `messages` "
                'or `text`; for rows without a completion set data.loss_on = "all"'
            )
    if s.entry == "dpo":
        kinds = s["loss_type"] or ["sigmoid"]
        if s["rpo_alpha"] is not None:
            kinds = [*kinds, "sft"]
            draft.set("algorithm.loss.loss_weights", [1.0] * (len(kinds) - 1) + [s["rpo_alpha"]], "rpo_alpha")
        draft.set("algorithm.loss.loss_type", kinds[0] if len(kinds) == 1 else kinds, "loss_type")
        _smoothing(draft, kinds)


def _smoothing(draft: Draft, kinds: Sequence[str]) -> None:
    """Label smoothing of DPO, for the loss types that read it in TRL."""
    s, text = draft.source, "TRL 1.16 does not read it with sigmoid, as earlier versions did"
    if not s["label_smoothing"]:
        return
    if not set(kinds) & {*SMOOTHED}:
        draft.unread["label_smoothing"] = f"only {', '.join(SMOOTHED)} read it in TRL 1.16"
        if "sigmoid" in kinds:
            draft.remarks.append(f"label_smoothing: {text}; set algorithm.loss.label_smoothing for conservative DPO")
    elif "sigmoid" in kinds:
        raise s.refused("label_smoothing", f"{text}; here sigmoid would read it too")
    else:
        draft.copy("algorithm.loss.label_smoothing", "label_smoothing")


def _placement(draft: Draft, processes: int, online: bool) -> None:
    """One process: the embedded backend. Several, or vLLM: Ray."""
    s = draft.source
    vllm = online and s["use_vllm"]
    if processes == 1 and not vllm:
        return
    draft.set("launcher.use", "ray")
    if processes > 1:
        quantized = s["use_peft"] and (s["load_in_4bit"] or s["load_in_8bit"])
        note = "the trainer fsdp would divide weights, and quantised ones cannot be divided" if quantized else ""
        draft.set("trainer.use", "deepspeed" if quantized else "fsdp", note=note)
        draft.set("placement.policy.ranks", processes, note=_processes(processes))
        if (s.entry in ("dpo", "kto") and not s["reference_free"]) or (online and s["beta"]):
            draft.set("placement.reference.ranks", processes)
            draft.set("placement.reference.share", "policy")
    if online:
        parallel = s.positive("vllm_tensor_parallel_size") if vllm else 1
        if processes % parallel:
            raise s.refused("vllm_tensor_parallel_size", f"it does not divide the {processes} processes")
        draft.set("generator.use", "vllm", "use_vllm")
        draft.set("placement.generator.ranks", processes // parallel)
        draft.set("placement.generator.share", "policy", "vllm_mode")
