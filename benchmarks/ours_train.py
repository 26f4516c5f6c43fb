"""Time whole training steps of ours, through the same controller as `rlhf train`, and the phases of a step."""

from __future__ import annotations

import functools
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rlhf.interfaces import Observer
from rlhf.plugins import Plugins
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.loop.offline import offline
from rlhf_runtime.loop.online import online
from rlhf_runtime.loop.run import OnlineRun
from rlhf_runtime.setup.build import build
from rlhf_runtime.setup.prepare import prepare
from settings import (
    ANSWERS,
    BETAS,
    EPS,
    LEARNING_RATE,
    LONG_PROMPT,
    LONGEST,
    MAX_GRAD_NORM,
    MAX_NEW_TOKENS,
    OURS,
    PREFERENCES,
    PROMPT_TOKENS,
    PROMPTS,
    ROWS,
    SAMPLES,
    THREADS,
    WEIGHT_DECAY,
    Clock,
    Ended,
    arm_arguments,
    settle,
    write,
)

Options = Mapping[str, Mapping[str, Any]]
"""Of our run file, section by section, laid over the workload's."""


def run_file(
    workload: str, precision: str, work: Path, steps: int, output: str, scale: int, options: Options = OURS
) -> RunFile:
    run: dict[str, Any] = {
        "run": {"output": output, "steps": steps, "threads": THREADS},
        "policy": {"model": str(work / ("ending" if workload == "grpo-natural" else "model")), "dtype": precision},
        "trainer": {
            "lr": LEARNING_RATE,
            "betas": list(BETAS),
            "eps": EPS,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": MAX_GRAD_NORM,
        },
    }
    if workload == "sft":
        data = {
            "train": str(work / f"rows-{scale}.jsonl"),
            "batch_size": ROWS * scale,
            "response": "completion",
            "max_tokens": LONGEST + 8,
        }
        return apply_options({**run, "algorithm": "sft", "data": data}, options)
    if workload in PREFERENCES:
        return apply_options(preferences(run, workload, work), options)
    sampling = {
        "samples_per_prompt": SAMPLES,
        "max_new_tokens": MAX_NEW_TOKENS,
        "ignore_eos": workload == "grpo-forced",
    }
    data = {
        "train": str(work / "prompts.jsonl"),
        "batch_size": PROMPTS * scale,
        "max_tokens": PROMPT_TOKENS + MAX_NEW_TOKENS,
    }
    reward = f"file:{Path(__file__).with_name('ours_reward.py')}:score"
    return apply_options({**run, "algorithm": "grpo", "reward": reward, "data": data, "sampling": sampling}, options)


def preferences(run: dict[str, Any], workload: str, work: Path) -> dict[str, Any]:
    prompts = workload == "dpo-prompts"
    run["data"] = {
        "train": str(work / ("pairs-prompts.jsonl" if prompts else "pairs.jsonl")),
        "batch_size": ROWS,
        "max_tokens": max(LONGEST, LONG_PROMPT + ANSWERS[1]) + 8,
    }
    if workload == "reward":
        run["policy"]["model"] = str(work / "scalar")
        return {**run, "algorithm": "reward_model"}
    if workload == "dpo-cached":
        run["reference"] = {"precompute": True}
    return {**run, "algorithm": "dpo"}


def apply_options(run: dict[str, Any], options: Options) -> RunFile:
    for section, values in options.items():
        run[section] = {**run.get(section, {}), **values}
    return RunFile.model_validate(run)


class Watch(Observer):
    """Ticks the clock at the end of every step and cuts the phases' times there."""

    name = "watch"

    def __init__(self, clock: Clock, phases: Phases) -> None:
        super().__init__()
        self.clock, self.phases = clock, phases

    def step_finished(self, step: int, metrics: Any) -> None:
        self.clock.step(self.phases.cut(metrics))


class Phases:
    """Seconds per step in the calls that do the arithmetic."""

    def __init__(self) -> None:
        self.now: dict[str, float] = defaultdict(float)
        self.tokens, self.trained, self.computed = 0, 0, 0
        self.steps: list[dict[str, float]] = []
        self.first: dict[str, float] = {}
        """Loss and gradient norm of the first step."""

    def watch(self, owner: Any, method: str, phase: str) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                settle()
                self.now[phase] += time.perf_counter() - start

        setattr(owner, method, timed)

    def watch_generator(self, generator: Any) -> None:
        original = generator.generate

        def timed(requests: Any) -> Any:
            turns, start = original(requests), time.perf_counter()
            for position, turn in turns:
                self.now["generate"] += time.perf_counter() - start
                self.tokens += len(turn.ids)
                yield position, turn
                start = time.perf_counter()
            self.now["generate"] += time.perf_counter() - start

        generator.generate = timed

    def watch_scorer(self, stream: Any) -> None:
        """Wall time from the end of generation to the last score is the part of scoring that a step waits for."""
        original = stream.rollouts.run

        def timed(*arguments: Any) -> Any:
            generated, start = self.now["generate"], time.perf_counter()
            groups = original(*arguments)
            self.now["score and hand over"] += time.perf_counter() - start - (self.now["generate"] - generated)
            return groups

        stream.rollouts.run = timed

    def watch_trainer(self, trainer: Any) -> None:
        accumulate, learning = trainer.accumulate, []

        def count_tokens(micros: Any, *arguments: Any) -> Any:
            self.trained += sum(micro.tokens for micro in micros)
            learning.append(True)
            try:
                return accumulate(micros, *arguments)
            finally:
                learning.pop()

        def entered(module: Any, inputs: Any, output: Any) -> None:
            if learning:
                self.computed += inputs[0].numel()

        trainer.module.get_input_embeddings().register_forward_hook(entered)
        trainer.accumulate = count_tokens
        self.watch(trainer, "accumulate", "forward and backward")
        self.watch(trainer, "apply", "optimizer")
        self.watch(trainer, "forward", "log-probs")

    def cut(self, metrics: Any) -> int:
        """End a step. Returns its tokens: those that it sampled, or else those that it learned from."""
        self.first = self.first or {name: metrics[f"policy/{name}"] for name in ("loss", "grad_norm")}
        tokens = {"trained_tokens": self.trained, "computed_tokens": self.computed}
        self.steps.append({**self.now, **tokens, "step": metrics["time/step"]})
        tokens_of_step = self.tokens or self.trained
        self.now.clear()
        self.tokens = self.trained = self.computed = 0
        return tokens_of_step


def keep_engine(eager: bool) -> None:
    """A run with vLLM takes over the engine of the one before, and sends its weights to it before it samples."""
    from rlhf_plugin_vllm import generator

    start, engines = generator.Engine, []

    def engine(config: Any, *rest: Any) -> Any:
        if not engines:
            engines.append(start(config.model_copy(update={"eager": eager}), *rest))
            engines[0].close = lambda: None
        return engines[0]

    generator.Engine = engine


def measure(
    workload: str, precision: str, work: Path, clock: Clock, steps: int, scale: int = 1, options: Options = OURS
) -> dict[str, Any]:
    """Make steps, as many as the clock lets it make, and at most ``steps``."""
    phases = Phases()
    with tempfile.TemporaryDirectory() as folder:
        config = run_file(workload, precision, work, steps, f"{folder}/run", scale, options)
        prepared = prepare(config, Plugins.discover())
        run = build(replace(prepared, observers={**prepared.observers, "watch": Watch(clock, phases)}))
        trainer = run.roles["policy"].group.worker
        phases.watch_trainer(trainer)
        if "reference" in run.roles and not config.reference.precompute:
            phases.watch(run.roles["reference"].group.worker, "forward", "log-probs")
        if isinstance(run, OnlineRun):
            phases.watch_generator(run.sampler.weights.generator)
            phases.watch_scorer(run.stream)
        try:
            with suppress(Ended):
                clock.begin()
                online(run) if isinstance(run, OnlineRun) else offline(run)
            result = clock.result()
        finally:
            run.close()
    result["parameters"] = sum(p.numel() for p in trainer.module.parameters())
    result["phases"] = [step for step, timed in zip(phases.steps, clock.timed, strict=True) if timed]
    return result | {"first": phases.first}


def main() -> None:
    arguments = arm_arguments(__doc__)
    torch.set_num_threads(THREADS)
    clock, steps = Clock(arguments.warmup), arguments.warmup + arguments.steps
    result = measure(arguments.workload, arguments.precision, arguments.work, clock, steps, arguments.scale)
    write(arguments.result, result)


if __name__ == "__main__":
    main()
