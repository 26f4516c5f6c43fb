"""Whole runs in this process: the peak up to the end of each phase, above the process after import."""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planned.cases import make_model
from planned.process import resident, weigh

Case = dict[str, Any]
ONLINE = ("grpo", "ppo")


def run_flags(case: Case, models: Path, folder: Path) -> dict[str, str]:
    """The run: micro-batches are full, all sequences are as long as they may be. Models and run go to the folders."""
    from rlhf.testing.tiny import tiny_reward_model

    names, algorithm = dict(case["flags"]), case["flags"]["algorithm.use"]
    for key, value in names.items():
        if value.startswith("{"):
            names[key] = str(make_model(models, value.strip("{}")))
    if names.get("reward") == "model:{scores}":
        names["reward"] = f"model:{_scores(models, tiny_reward_model)}"
        names |= {"roles.reward_model.dtype": "fp32", "roles.reward_model.micro_tokens": str(case["tokens"])}
    length, pairs = case["length"], algorithm in ("dpo", "reward_model")
    computed = 2 * length - length // 2 if pairs else length
    rows = 2 * (case["tokens"] // computed)
    flags = {"policy.model": str(make_model(models, case["model"])), "policy.dtype": case["dtype"]}
    flags |= {"policy.micro_tokens": str(case["tokens"]), "data.max_tokens": str(length), "data.template": "plain"}
    flags |= {"data.train": str(_data(folder, length, 64)), "data.batch_size": str(rows), "run.steps": "2"}
    flags |= {"run.output": str(folder / "run"), "run.threads": "1"}
    if algorithm in ONLINE:
        flags |= {"data.batch_size": "3", "sampling.samples_per_prompt": "8", "sampling.ignore_eos": "true"}
        flags |= {"sampling.max_new_tokens": str(length // 2), "data.max_prompt_tokens": str(length // 2)}
        flags |= {"reward": "math"}
    if algorithm == "ppo":
        flags |= {"critic.dtype": case["dtype"], "critic.micro_tokens": str(case["tokens"])}
    return flags | names


def _scores(models: Path, make: Callable[..., Path]) -> Path:
    from planned.cases import MODELS

    path = models / "scores"
    return path if path.exists() else make(path, std=0.02, **MODELS["100M"])


def _data(folder: Path, length: int, count: int) -> Path:
    """Rows of letters, half prompt and half answer (with the end token): no two alike."""
    import random

    rng = random.Random(0)

    def text(size: int) -> str:
        return "".join(rng.choices(string.ascii_letters, k=size))

    path, half = folder / f"{length}.jsonl", length // 2
    answers = ("response", "chosen", "rejected")
    rows = [{"prompt": text(half), "answer": "0"} | {a: text(length - half - 1) for a in answers} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measure_run(flags: dict[str, str]) -> dict[str, int]:
    """{phase: bytes}; training is measured to the end of the run, other phases before the first step."""
    import torch
    from rlhf.config import load
    from rlhf.controller.build import train
    from rlhf.plugins import Plugins
    from rlhf_plugin_local.generator import TransformersGenerator
    from rlhf_plugin_local.trainer import TorchTrainer

    torch.set_num_threads(1)
    plugins = Plugins.discover()
    before, found = weigh(), {}
    early = {name for name in ("reference", "teacher") if flags.get(f"{name}.precompute") == "true"}

    def note(phase: str) -> None:
        if phase == "train" or "train" not in found:
            found[phase] = resident("VmHWM") - before

    def phase_of(role: str, otherwise: str) -> str:
        return "precompute" if role in early else "generate" if role == "reward_model" else otherwise

    def watch(cls: type, name: str, otherwise: str) -> None:
        inner = getattr(cls, name)

        @functools.wraps(inner)
        def outer(self: Any, *args: Any, **options: Any) -> Any:
            result = inner(self, *args, **options)
            note("load" if otherwise == "load" and self.spec.role.name not in early else
                 phase_of(self.spec.role.name, otherwise))  # fmt: skip
            return result

        setattr(cls, name, outer)

    watch(TorchTrainer, "__init__", "load")
    watch(TorchTrainer, "forward", "forward")
    watch(TorchTrainer, "update", "train")
    generate = TransformersGenerator.generate

    def generated(self: Any, *args: Any) -> Any:
        yield from generate(self, *args)
        note("generate")

    TransformersGenerator.generate = generated  # type: ignore[method-assign]
    train(load(None, list(flags.items())), plugins)
    note("train")
    return found
