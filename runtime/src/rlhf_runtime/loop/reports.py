"""Reports of a run's steps: a line in ``metrics.jsonl``, calls of observers, output on the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from rlhf.errors import RlhfError, boundary
from rlhf.interfaces import Observer
from rlhf.ops.batch import Batch
from rlhf.types import Annotation, RunOptions
from rlhf.types.arrays import float_array

from rlhf_runtime.checkpoint.saved_groups import TellPrompt, TokenValues, write_groups
from rlhf_runtime.checkpoint.store import CheckpointStore
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.loop.learn import LearnReports, Metrics
from rlhf_runtime.loop.schedule import due
from rlhf_runtime.models.roles import Role
from rlhf_runtime.observe.progress import Progress
from rlhf_runtime.observe.sample_metrics import failure_metrics, info_metrics, source_metrics
from rlhf_runtime.observe.timeline import Timeline
from rlhf_runtime.observe.trl_names import trl_names
from rlhf_runtime.output.metrics import TIME
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_runtime.samples.stream import ReadyBatch

TOKEN_OUTPUTS = ("logprobs", "values")
"""Outputs of roles with one number per token."""
ADVANTAGES = "advantages"


def token_values(batch: Batch, annotations: Sequence[Annotation]) -> TokenValues:
    """{(number of its group in the batch, sample): {``ROLE/OUTPUT`` or ``advantages``: a value for each sampled token,
    in order}}. If all values are equal, they are stored as one value.

    Args:
        batch: the batch after credit.
        annotations: the annotations in it.

    Samples that the batch contains in a changed form are left out. If the units of the batch are not samples, all are
    left out.
    """
    columns = {f"{a.role}/{a.output}": a.column for a in annotations if a.output in TOKEN_OUTPUTS and a.view == "live"}
    columns = {name: column for name, column in {**columns, ADVANTAGES: ADVANTAGES}.items() if column in batch.tok}
    if not columns or not {"group", "sample", "own_tokens"} <= {*batch.unit}:
        return {}
    mask_N = batch.tok["loss_mask"]
    count_U = torch.zeros(batch.units, dtype=torch.int64).index_add_(0, batch.unit_N, mask_N.long())
    ends, own_tokens = count_U.cumsum(0).tolist(), batch.unit["own_tokens"].tolist()
    values = {name: batch.tok[column][mask_N].float().numpy() for name, column in columns.items()}
    result: dict[tuple[int, int], dict[str, Any]] = {}
    for unit, index in enumerate(zip(batch.unit["group"].tolist(), batch.unit["sample"].tolist(), strict=True)):
        first, last = ends[unit] - own_tokens[unit], ends[unit]
        if own_tokens[unit] and own_tokens[unit] == int(count_U[unit]):
            parts: dict[str, Any] = {name: values_A[first:last] for name, values_A in values.items()}
            result[index] = {n: float_array(v[:1] if (v == v[0]).all() else v, n) for n, v in parts.items()}
    return result


class Reports(LearnReports):
    """Writes one line per step and calls the observers.

    Args:
        store: writes the error message if the disk is full.
        timeline: shows the phases of steps.
        measure: returns the throughput and memory of a step, from its times.
    """

    def __init__(
        self,
        config: RunFile,
        directory: RunDirectory,
        progress: Progress,
        observers: Mapping[str, Observer],
        store: CheckpointStore,
        timeline: Timeline,
        measure: Callable[[Metrics], Metrics],
    ) -> None:
        self._config, self._directory, self._progress, self._store = config, directory, progress, store
        self._observers, self.timeline, self._measure = dict(observers), timeline, measure
        self._trl = {section.label for section in config.observer if section.names == "trl"}
        self._optional = {section.label for section in config.observer if section.on_error == "warn"}
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
        """Add the measurements of the step to ``metrics`` and write its line. ``steps_done`` includes this step."""
        if self._times:
            times = {f"{TIME}{phase}": seconds for phase, seconds in self._times.items()}
            times[f"{TIME}step"] = time.perf_counter() - self._started
            metrics |= times | self._measure(times)
            self._times = {}
        with self._store.writing(self._directory.metrics.path):
            self._directory.metrics.append(steps_done, metrics)

    def tell(self, steps_done: int, metrics: Metrics) -> None:
        """Send the line that :meth:`record` wrote to observers and the terminal."""
        trl_metrics = trl_names({"step": steps_done, **metrics})  # dashboards of TRL plot over its step
        for name in list(self._observers):
            self._call(name, "step_finished", steps_done, trl_metrics if name in self._trl else metrics)
        self._progress.step(steps_done, metrics)

    def observe(self, event: str, *arguments: Any) -> None:
        """Call the method ``event`` of every observer. Raises RlhfError naming the observer and the event."""
        for name in list(self._observers):
            self._call(name, event, *arguments)

    def end(self, status: str) -> None:
        """Call ``run_ended`` of every observer, even if another one raises RlhfError. The last error is raised."""
        with ExitStack() as calls:
            for name in reversed(list(self._observers)):
                calls.callback(self._call, name, "run_ended", status)

    def _call(self, name: str, event: str, *arguments: Any) -> None:
        try:
            with boundary(RlhfError, f"observer {name!r}, {event}"):
                getattr(self._observers[name], event)(*arguments)
        except RlhfError as error:
            if name not in self._optional or event == "run_started":
                raise
            del self._observers[name]
            self._progress.note(f"{error}. The run continues without this observer until it is resumed")

    def count(self, label: str, number: int, total: int) -> None:
        self._progress.count(label, number, total)

    def skipped(self, step: int, reason: str, minibatch: Batch) -> None:
        """Keep the batch of a skipped optimizer step for inspection."""
        with self._store.writing(self._directory.path / "skipped"):
            path = self._directory.keep_batch(step + 1, reason, minibatch)
        self._progress.note(f"optimizer step skipped ({reason}); its batch is kept in {path}")

    def credited(self, batch: Batch, annotations: Sequence[Annotation]) -> None:
        """Keep the values computed for each token until the samples of the step are written."""
        self._token_values = token_values(batch, annotations)

    def samples(
        self,
        steps_done: int,
        ready: ReadyBatch,
        prompt_of: TellPrompt,
        options: RunOptions,
    ) -> Metrics:
        """Write the groups that a step trained on, show them on the terminal, and pass them to observers.

        Args:
            prompt_of: returns the prompt of a trajectory, which is written with its answer.
            options: the rewards of the run.

        Returns the counts of the step's prompts and the means of its samples.
        """
        if self._config.checkpoint.save_rollouts:
            with self._store.writing(path := self._directory.rollouts(steps_done)):
                write_groups(path, ready.groups, prompt_of, self._token_values)
        self._token_values = {}
        self._progress.last_sample(steps_done, ready.groups)
        if due(steps_done, self._config.run.show_samples):
            self._progress.samples(steps_done, ready.groups)
        self.observe("rollouts_finished", steps_done, ready.groups)
        counts = {f"stream/{name}": value for name, value in ready.counts.items()}
        counts |= {"stream/version": float(ready.version)} | ready.curriculum_metrics
        failed, scored = (ready.counts.get(name, 0.0) for name in ("failed_samples", "scored"))
        counts |= failure_metrics(ready.groups, failed, scored, options.step_sources)
        return counts | source_metrics(ready.groups, options.teachers) | info_metrics(ready.groups)

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
