"""Whole runs in this process: the peak of each phase over all steps, above the process after import."""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planned.cases import make_model
from planned.process import forget_peak, resident, weigh

Case = dict[str, Any]
ONLINE = ("grpo", "ppo")


def run_flags(case: Case, models: Path, folder: Path) -> dict[str, str]:
    """The run: micro-batches are full, all sequences are as long as they may be. Models and run go to the folders."""
    from rlhf_testing.tiny import tiny_reward_model

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
    """{phase: bytes}: the most of all its calls, each by itself."""
    import torch
    from rlhf.plugins import Plugins
    from rlhf_plugin_local.generator import TransformersGenerator
    from rlhf_plugin_local.trainer import TorchTrainer
    from rlhf_runtime.config.load import load
    from rlhf_runtime.setup.build import train

    torch.set_num_threads(1)
    plugins = Plugins.discover()
    before, found = weigh(), {}
    inside: list[str] = []
    early = {name for name in ("reference", "teacher") if flags.get(f"{name}.precompute") == "true"}

    def note(phase: str) -> None:
        found[phase] = max(found.get(phase, 0), resident("VmHWM") - before)

    @contextmanager
    def measuring(phase: str) -> Iterator[None]:
        """Calls may lie in one another: samples are scored while others are drawn."""
        if inside:
            note(inside[-1])
        forget_peak()
        inside.append(phase)
        try:
            yield
        finally:
            note(inside.pop())

    def watch(cls: type, name: str, phase: str) -> None:
        inner = getattr(cls, name)

        @functools.wraps(inner)
        def outer(self: Any, *args: Any, **options: Any) -> Any:
            loads = name == "__init__"
            role = (options.get("spec") or args[1] if loads else self.spec).role.name
            scores = role == "reward_model" and not loads
            with measuring("precompute" if role in early else "generate" if scores else phase):
                return inner(self, *args, **options)

        setattr(cls, name, outer)

    watch(TorchTrainer, "__init__", "load")
    watch(TorchTrainer, "forward", "forward")
    watch(TorchTrainer, "update", "train")
    generate = TransformersGenerator.generate

    def generated(self: Any, *args: Any) -> Any:
        with measuring("generate"):
            yield from generate(self, *args)

    TransformersGenerator.generate = generated  # type: ignore[method-assign]
    train(load(None, list(flags.items())), plugins)
    return found
