"""What the plan of such a run says, in bytes above the process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from planned.cases import CACHE_GIB

Flags = dict[str, str]


def layout_of(flags: Flags) -> Any:
    from rlhf.plugins import Plugins
    from rlhf_plugin_plan import Machine, resolve
    from rlhf_runtime.config.load import load

    return resolve(load(None, list(flags.items())), Plugins.discover(), Machine("cpu"))


def predicted(case: dict[str, Any], path: Path) -> int:
    """Of one phase of one role, or of the engine."""
    from rlhf_plugin_plan import sum_of
    from rlhf_plugin_plan.busy import forwarding, training
    from rlhf_plugin_plan.engines import engine_resting, sampling
    from rlhf_plugin_plan.formulas import LIBRARIES
    from rlhf_plugin_plan.phases import loading, resting

    layout = layout_of(flags_of(case, path))
    role = layout.role(case.get("role", "policy"))
    if case.get("after"):
        return moments_of(layout)["generate"]
    if case["what"] in ("engine", "generate"):
        engines = layout.engines
        held = engine_resting(engines, layout.machine, asleep=False) if case["what"] == "engine" else {}
        before = {} if held else {"weights": resting(role)[0]["weights"]}  # no step yet: no optimizer state
        return sum(map(sum_of, (held, before, sampling(engines, layout.machine)))) + LIBRARIES["cpu"]
    if case["what"] == "load":
        return sum_of(loading(role, "cpu")) + LIBRARIES["cpu"]
    frozen = case["what"] == "forward"
    if frozen:
        role = replace(role, trained=False)
    busy = forwarding(role, "cpu") if frozen else training(role, "cpu")[0]
    rest = resting(role)[0]
    rest.pop("gradients", None)
    return sum_of(rest) + sum_of(busy) + LIBRARIES["cpu"]


def predicted_run(flags: Flags) -> dict[str, int]:
    """{phase: bytes}, each phase by itself: what another one left in the process's heap is in it."""
    return moments_of(layout_of(flags))


def moments_of(layout: Any) -> dict[str, int]:
    """{phase: bytes}, in order."""
    from rlhf_plugin_plan import make_plan
    from rlhf_plugin_plan.formulas import PROCESS

    [group] = make_plan(layout).groups
    return {phase: moment.total - PROCESS["cpu"] for phase, moment in group.moments.items()}


def flags_of(case: dict[str, Any], path: Path) -> Flags:
    """A run in which the case's role does what is measured."""
    role, half = case.get("role", "policy"), str(case["length"] // 2)
    section = role if role in ("policy", "critic") else f"roles.{role}"
    flags = {"policy.model": str(path), "policy.dtype": case["dtype"]}
    flags |= {"data.train": "unread.jsonl", "data.max_tokens": str(case["length"]), "data.max_prompt_tokens": half}
    if case.get("loss") == "pairwise":
        flags |= {"algorithm.use": "reward_model"}
        del flags["data.max_prompt_tokens"]
    elif role == "teacher":
        flags |= {"algorithm.use": "distill"}
    else:
        flags |= {"algorithm.use": "ppo" if role == "critic" else "grpo", "sampling.samples_per_prompt": "8"}
        flags |= {"sampling.max_new_tokens": half, "data.batch_size": str(case.get("samples", 64) // 8)}
        flags |= {"reward": f"model:{path}" if role == "reward_model" else "math"}
    flags[f"{section}.model"], flags[f"{section}.dtype"] = str(path), case["dtype"]
    flags[f"{section}.micro_tokens"] = str(case["tokens"] or 1024)
    flags[f"{section}.gradient_checkpointing"] = str(case.get("checkpointing", False)).lower()
    flags["trainer.shared_prefixes"] = str("shared" in case).lower()
    if "ema" in case:
        flags["trainer.ema_decay"] = str(case["ema"])
    if "lora" in case:
        flags["trainer.lora.rank"] = str(case["lora"]["rank"])
    if "ranks" in case:
        flags |= {"trainer.use": "deepspeed", "trainer.stage": str(case["stage"])}
        flags |= {"launcher.use": "ray", "generator.use": "vllm", f"placement.{role}.ranks": str(case["ranks"])}
    if "kernels" in case:
        flags["trainer.kernels"] = case["kernels"]
    if "optimizer" in case:
        flags["trainer.optimizer"] = case["optimizer"]
    if "offload" in case:
        flags["trainer.offload_optimizer"] = case["offload"]
    if case["what"] == "engine":
        flags |= {"launcher.use": "ray", "generator.use": "vllm", "generator.kv_cache_gib": str(CACHE_GIB)}
    return flags
