"""Time whole GRPO steps of ours on Ray: a torch trainer and a vLLM engine in their own processes, on the same cores."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

from ours_train import run_file
from rlhf.interfaces import Observer
from rlhf.plugins import Plugins
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.loop.online import online
from rlhf_runtime.loop.run import OnlineRun
from rlhf_runtime.setup.build import build
from rlhf_runtime.setup.prepare import prepare
from settings import THREADS, Clock, arm_arguments, write


class Watch(Observer):
    """Ticks the clock at the end of every step, and keeps its phases."""

    name = "watch"

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.phases = clock, []  # type: ignore[var-annotated]
        self._tokens = 0

    def rollouts_finished(self, step: int, groups: Any) -> None:
        self._tokens = sum(
            len(turn.ids) for group in groups for t in group.trajectories for turn in t.turns if turn.sampled
        )

    def step_finished(self, step: int, metrics: Any) -> None:
        self.clock.step(self._tokens)
        self.phases.append({k: v for k, v in metrics.items() if k.startswith(("time/", "sync/"))})


def main() -> None:
    arguments = arm_arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        steps = arguments.warmup + arguments.steps
        embedded = run_file(arguments.workload, arguments.precision, arguments.work, steps, f"{folder}/run", 1)
        settings = embedded.model_dump(exclude_unset=True)
        settings |= {
            "launcher": {"use": "ray", "cpus": THREADS},
            "placement": {"policy": {"devices": THREADS}, "generator": {"devices": THREADS, "share": "policy"}},
            "generator": {"use": "vllm", "max_sequences": 128, "kv_cache_gib": 0.25},
        }
        clock = Clock(arguments.warmup)
        watch = Watch(clock)
        prepared = prepare(RunFile.model_validate(settings), Plugins.discover())
        run = build(replace(prepared, observers={**prepared.observers, "watch": watch}))
        assert isinstance(run, OnlineRun)
        clock.begin()
        try:
            online(run)
        finally:
            run.close()
    write(arguments.result, clock.result() | {"phases": watch.phases[arguments.warmup :]})


if __name__ == "__main__":
    main()
