"""Reports of a run's steps: a line in ``metrics.jsonl``, calls of observers, output on the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf.errors import RlhfError, boundary
from rlhf.interfaces import Observer
from rlhf.ops.batch import Batch
from rlhf.types import Annotation

from rlhf_runtime.checkpoint import CheckpointStore
from rlhf_runtime.checkpoint.saved_groups import TellPrompt, TokenValues, write_groups
from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.models.roles import Role
from rlhf_runtime.observe.progress import Progress
from rlhf_runtime.observe.sample_metrics import failure_metrics, info_metrics, source_metrics
from rlhf_runtime.observe.timeline import NO_TIMELINE, Timeline
from rlhf_runtime.observe.token_values import token_values
from rlhf_runtime.observe.trl_names import trl_names
from rlhf_runtime.output.metrics import TIME
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_runtime.samples.stream import ReadyBatch


class Reports:
    """Writes one line per step and calls the observers.

    Args:
        store: writes the error message if the disk is full.
        timeline: shows the phases of steps.
        measure: given the times of a step, returns its throughput and memory.
        trl: the observers that get the names of TRL.
    """

    def __init__(
        self,
        directory: RunDirectory,
        progress: Progress,
        observers: Mapping[str, Observer],
        store: CheckpointStore,
        timeline: Timeline = NO_TIMELINE,
        measure: Callable[[Metrics], Metrics] = lambda times: {},
        trl: Collection[str] = (),
    ) -> None:
        self._directory, self._progress, self._observers, self._store = directory, progress, observers, store
        self.timeline, self._measure, self._trl = timeline, measure, trl
        self._started = time.perf_counter()
        self._times: dict[str, float] = {}
        self._covered: set[str] = set()
        self._said_equal = False
        self._token_values: TokenValues = {}

    def begin_step(self, step: int) -> None:
        """Start measuring the times of the next line."""
        self.timeline.step(step)
        self._started = time.perf_counter()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Wall time of a phase, reported as ``time/<phase>`` (seconds) in the next line."""
        start = time.perf_counter()
        try:
            with self.timeline.phase(phase), self._progress.phase(phase):
                yield
        finally:
            seconds = time.perf_counter() - start
            self._times[phase] = self._times.get(phase, 0.0) + seconds
            self._progress.spend(phase, seconds)

    def record(self, steps_done: int, metrics: Metrics) -> None:
        """Add what was measured in the step to ``metrics`` and write its line. ``steps_done`` counts this step too."""
        if self._times:
            times = {f"{TIME}{phase}": seconds for phase, seconds in self._times.items()}
            times[f"{TIME}step"] = time.perf_counter() - self._started
            metrics |= times | self._measure(times)
            self._times = {}
        with self._store.writing(self._directory.metrics.path):
            self._directory.metrics.append(steps_done, metrics)

    def tell(self, steps_done: int, metrics: Metrics) -> None:
        """Show observers and the terminal the line that :meth:`record` wrote."""
        for name, observer in self._observers.items():
            with boundary(RlhfError, f"observer {name!r}, step_finished"):
                observer.step_finished(steps_done, trl_names(metrics) if name in self._trl else metrics)
        self._progress.step(steps_done, metrics)

    def observe(self, event: str, *arguments: Any) -> None:
        """Call the method ``event`` of every observer. Raises RlhfError naming the observer and the event."""
        for name, observer in self._observers.items():
            with boundary(RlhfError, f"observer {name!r}, {event}"):
                getattr(observer, event)(*arguments)

    def credited(self, batch: Batch, annotations: Sequence[Annotation]) -> None:
        """Keep what was computed of each token, until the samples of the step are written."""
        self._token_values = token_values(batch, annotations)

    def samples(self, steps_done: int, ready: ReadyBatch, save: bool, show: bool, prompt_of: TellPrompt) -> Metrics:
        """Write the groups that a step was trained on, show them on the terminal, and pass them to observers.

        Args:
            prompt_of: the prompt of a trajectory, which is written beside its answer.

        Returns the counts of the step's prompts and the means of its samples.
        """
        if save:
            with self._store.writing(path := self._directory.rollouts(steps_done)):
                write_groups(path, ready.groups, prompt_of, self._token_values)
        self._token_values = {}
        self._progress.last_sample(steps_done, ready.groups)
        if show:
            self._progress.samples(steps_done, ready.groups)
        self.observe("rollouts_finished", steps_done, ready.groups)
        counts = {f"stream/{name}": value for name, value in ready.counts.items()}
        counts |= {"stream/version": float(ready.version)} | ready.curriculum_metrics
        counts |= failure_metrics(ready.groups, ready.counts.get("failed_samples", 0.0))
        return counts | source_metrics(ready.groups) | info_metrics(ready.groups)

    def name_uncovered(self, roles: Mapping[str, Role], metrics: Metrics) -> None:
        """After a trained role's first update, report once the parameters that got no gradient or did not change. If
        all advantages are 0, no parameter can get a gradient; that is reported instead."""
        for name, role in roles.items():
            if name in self._covered:
                continue
            report: Mapping[str, Sequence[str]] = role.every("coverage")[0]
            if not report:  # not updated yet
                continue
            if metrics.get(f"{name}/grad_norm") == 0 and metrics.get("advantage/abs_max") == 0:
                if not self._said_equal:
                    self._progress.note(
                        f"{name}: every advantage of this step is 0, so the gradient is 0 and nothing is learnt. All "
                        "rewards that are compared with each other are equal."
                    )
                self._said_equal = True
                continue
            self._covered.add(name)
            for finding, every in report.items():
                parameters = [p for p in every if ".lora_A." not in p]  # multiplied by B, which is 0 at the start
                if parameters:
                    examples = ", ".join(parameters[:5]) + (", ..." if len(parameters) > 5 else "")
                    finding = finding.replace("_", " ")
                    self._progress.note(
                        f"{name}: {len(parameters)} parameters {finding} after the first update: {examples}"
                    )
