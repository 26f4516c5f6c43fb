"""Samples and rewards of TRL's online trainers."""

from __future__ import annotations

from rlhf_cli.migrate.draft import Draft

OWN_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Rewards that TRL's script has under a name."""
PROMPT_ROOM = 2048
"""Tokens for prompts where TRL limits only answers."""


def sampling(draft: Draft) -> None:
    s = draft.source
    if s["repetition_penalty"] != 1 or s["generation_kwargs"]:
        name = "generation_kwargs" if s["generation_kwargs"] else "repetition_penalty"
        raise s.refused(name, "samples would come from another distribution than the one that is trained")
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
        draft.set("data.too_long", "drop", note="longer prompts are left out and counted; TRL cuts them")
    if s["eval_strategy"] != "no":
        draft.set("eval.samples", s["num_generations_eval"] or s["num_generations"], "num_generations_eval")
        draft.copy("eval.temperature", "temperature")


def rewards(draft: Draft) -> None:
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
            raise s.refused("reward_funcs", f"{name}: algorithm.shaping punishes long answers; leave it out")
        module, _, function = name.rpartition(".")
        if module or function in OWN_REWARDS:
            uses.append((f"python:{module or 'trl.rewards'}:{function}", "reward_funcs"))
        else:
            functions.append(f"{function} (weight {weights.pop(len(uses))})")
    if functions:
        draft.remarks.append(
            f"the rewards {', '.join(functions)} are functions of the script, not of TRL: name each, file:FILE.py:NAME"
        )
    if not uses and not functions:
        draft.remarks.append("name the rewards: a function in a file is file:FILE.py:NAME")
    for number, ((use, cause), weight) in enumerate(zip(uses, weights, strict=False)):
        draft.set(f"reward.{number}.use", use, cause)
        draft.set(f"reward.{number}.weight", weight, "reward_weights")
