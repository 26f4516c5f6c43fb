"""A run: everything around a step, from the first step to the end of the run."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlhf.errors import RlhfError, TrainingError, boundary
from rlhf.interfaces import Algorithm, RunInfo
from rlhf.ops.batch import Batch
from rlhf.types import Snapshot
from rlhf.types.examples import Example

from rlhf_runtime.calls.algorithm_calls import metrics_of
from rlhf_runtime.checkpoint.store import CheckpointStore
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.loop.checkpoint_state import RunState
from rlhf_runtime.loop.control import Control
from rlhf_runtime.loop.evaluate import Evaluation
from rlhf_runtime.loop.learn import Metrics, learn, snapshot
from rlhf_runtime.loop.reports import Reports
from rlhf_runtime.loop.saves import Saves
from rlhf_runtime.loop.schedule import UpdateSchedule, due
from rlhf_runtime.loop.signals import StopRequest
from rlhf_runtime.models.roles import Role
from rlhf_runtime.observe.progress import Progress
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_runtime.samples.acceptance import left_out
from rlhf_runtime.samples.failures import Failures
from rlhf_runtime.samples.rollouts import Sampler
from rlhf_runtime.samples.stream import ReadyBatch, Stream


@dataclass(kw_only=True)
class Run:
    """A run that is ready for its first step, made by :func:`rlhf_runtime.setup.build.build`. The loop iterates over
    :meth:`steps` and ends each step with :meth:`complete`, a sync and :meth:`finish`."""

    config: RunFile
    """The run file with every option of every plugin filled in."""
    algorithm: Algorithm
    roles: Mapping[str, Role]
    data: TrainData
    total_steps: int
    schedule: UpdateSchedule
    first_step: int
    """Number of finished steps when this process started: 0, or the step of the checkpoint from which the run
    continues."""
    sampler: Sampler | None
    """Generates answers; None in an offline run whose held-out rows the policy does not answer."""
    evaluation: Evaluation | None
    """None if there are no held-out rows."""
    state: RunState
    """The content of checkpoints."""
    saves: Saves
    directory: RunDirectory
    store: CheckpointStore
    reports: Reports
    progress: Progress
    failures: Sequence[Failures]
    """Counters of failed samples, for training and for evaluations."""
    stop: StopRequest
    control: Control
    """Requests of observers to the run."""
    resources: ExitStack
    """Releases everything that was started for the run."""

    steps_done: int = field(init=False, default=0)
    """Number of finished steps, including those before a resume."""
    status: Literal["finished", "stopped", "failed"] = field(init=False, default="failed")
    left_out: Counter[str] = field(init=False, default_factory=Counter)
    """Sum of :attr:`ReadyBatch.counts` over the steps without a training signal."""
    report: Path | None = field(init=False, default=None)
    """The page that shows the run, once it is written."""
    _stopping: bool = field(init=False, default=False)

    def steps(self) -> Iterator[int]:
        """The steps of the run, starting at the last checkpoint. Ends early after a signal (a checkpoint is saved
        first), or when ``eval.patience`` evaluations brought no improvement."""
        name = self.config.run.name or Path(self.config.run.output).name
        settings = self.config.model_dump(mode="json")
        info = RunInfo(name, self.directory.path, settings, self.total_steps, self.first_step, self.control)
        self.progress.begin(self.first_step)
        self.reports.observe("run_started", info)
        self.control.apply()
        if self.config.eval.at_start and self.first_step == 0 and self.evaluation is not None:
            # `best` does not see this value, because no checkpoint holds the model before training.
            metrics = self._evaluate(self.evaluation, 0)
            self.reports.record(0, metrics)
            self.reports.tell(0, metrics)
        self.steps_done = self.first_step
        # A process may have died between its last checkpoint and the end of the run. The resume does the rest.
        if self.state.unfinished is not None:
            self.directory.metrics.cut(self.steps_done - 1)  # an earlier resume may have come further than this
            self.finish(self.steps_done - 1, self.state.unfinished, saved=True)
        else:
            self._stopping = self._stops(self.steps_done)
            self.saves.export_best(self.steps_done)
            self.saves.export(self.steps_done, last=self._is_last(self.steps_done))
        with self.stop:
            while self.steps_done < self.total_steps and not self._stopping:
                self.reports.begin_step(self.steps_done)
                yield self.steps_done
        self.reports.timeline.step(None)
        self.status = "finished" if self.steps_done == self.total_steps else "stopped"

    @property
    def exit_code(self) -> int:
        """0, or 128 + the number of the signal that ended the run before its last step, as in shells, so that a command
        after `rlhf train ... &&` does not start with an unfinished model."""
        return 128 + self.stop.signal if self.status == "stopped" and self.stop.signal else 0

    @property
    def outcome(self) -> str:
        """The status, with the samples that failed since the start or the resume."""
        scope = " since the resume" if self.progress.first else ""
        return ", ".join([self.status, *(f"{failures}{scope}" for failures in self.failures if failures.failed)])

    @property
    def continue_with(self) -> str:
        """The command that continues a run that was stopped; empty if the run ended by itself."""
        if self.status != "stopped" or self._no_patience:
            return ""
        last = self.config.run.stop_after
        flag = f" --run.stop_after {self.total_steps}" if last is not None and self.steps_done >= last else ""
        return f"rlhf train {shlex.quote(str(self.directory.path / 'config.toml'))} --resume{flag}"

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Wall time of a phase of this step, reported as ``time/<phase>`` (seconds)."""
        return self.reports.timed(phase)

    def learn(self, step: int, batch: Batch) -> Metrics:
        """The phase that changes weights: :func:`rlhf_runtime.loop.learn.learn`."""
        self.take_devices_back()
        with self.timed("learn"):
            metrics = learn(batch, self.algorithm, self.roles, self.config.run.seed, step, self.reports)
        self._catch_up(step)
        return metrics

    def take_devices_back(self) -> None:
        """Give the roles the devices that they share with the generator. Called before they learn or save."""
        if self.sampler is not None:
            self.sampler.phases.begin_learning()

    def sync(self, version: int) -> Metrics:
        """Send the policy's weights to the generator, which samples with ``version`` from now on. Nothing is sent if no
        sample will be drawn with them: inside a round, or between the evaluations of an offline run."""
        if self.sampler is None:
            return {}
        used = self.trains_on(version) or self._evaluates(version)
        # A process always makes its first sync, because its generator has no weights of the run yet.
        if not used and version != self.first_step:
            return {}
        self.sampler.phases.begin_sync()
        metrics = self.sampler.weights.push(version)
        self.reports.timeline.instant("weights", version=version)
        return metrics

    def trains_on(self, version: int) -> bool:
        """Whether training samples are drawn with the weights of ``version``."""
        return False

    def next_examples(self) -> list[Example]:
        """The tokenised rows of an offline step."""
        return self.data.examples(self.data.take(self.config.data.batch_size, self.steps_done))

    def nothing_to_learn(self, step: int, ready: ReadyBatch | None = None) -> Metrics:
        """Count a step whose rows or groups have no training signal. No role is trained. Snapshots that are due are
        taken all the same, or the next steps would train against an older reference."""
        if snapshots := [update for update in self.algorithm.updates(step) if isinstance(update, Snapshot)]:
            self.take_devices_back()
        for update in snapshots:
            snapshot(self.roles, update)
        self._catch_up(step)
        counts = ready.counts if ready is not None else {}
        self.left_out.update(counts)
        reason = left_out(counts)
        self.progress.note(f"step {step + 1}: nothing to learn from, no update{reason and f': {reason}'}")
        return {"empty": 1.0}

    def complete(self, step: int, batch: Batch | None, metrics: Metrics, ready: ReadyBatch | None = None) -> None:
        """After learning: adapt, write the samples, and hold the state, so that a later failure loses no step.

        Args:
            batch: the batch that the step trained on; None if there was nothing to learn from.
            metrics: metrics of the step; this method adds more.
            ready: the samples of an online step.
        """
        steps_done = step + 1
        if batch is not None:
            metrics |= self._adapt(step, batch, metrics)
        if ready is not None:
            metrics |= self.reports.samples(steps_done, ready, self.data.template.prompt_of, self.algorithm.run)
        elif self.data.curriculum is not None:
            metrics |= self.data.curriculum.metrics()
        if self.config.stream.replay is None:  # a replay draws no rows
            metrics["epoch"] = self.data.epoch
        if self.config.data.too_long == "drop":
            metrics["data/dropped"] = float(self.data.dropped)
        if self.config.data.bad_rows == "drop":
            metrics["data/bad_rows"] = float(self.data.bad_rows)
        self.saves.hold(steps_done, unfinished=metrics)  # a resume does what :meth:`finish` did not

    def finish(self, step: int, metrics: Metrics, saved: bool = False) -> None:
        """After the sync: evaluate, write the step's line, tell the observers, save a checkpoint if due.

        Args:
            saved: whether the step has a checkpoint, because its sync, its evaluation or an observer failed. Then this
                process resumes after the step.
        """
        self.steps_done = steps_done = step + 1
        is_best, section = False, self.config.checkpoint
        # Until every observer was told, a resume ends the step once more, or an observer would miss it. The checkpoint
        # of a resumed step is complete already, so nothing is held for rescue() here and below.
        if not saved:
            self.saves.hold(steps_done, unfinished=metrics)  # including metrics of the sync
        if self.evaluation is not None and self._evaluates(steps_done):
            try:
                metrics |= self._evaluate(self.evaluation, steps_done)
                is_best = self.evaluation.best.update(steps_done, metrics) and section.save_best
            except Exception:
                self.reports.record(steps_done, metrics)  # the step itself is complete
                raise
        self.reports.record(steps_done, metrics)
        self.reports.tell(steps_done, metrics)
        self.control.apply()
        if not saved:
            self.saves.hold(steps_done, is_best)  # with what the observers changed, and with their own state
        # Read once. A signal that comes later is handled after the next step, which then saves a checkpoint.
        self._stopping = self._stops(steps_done)
        last, is_asked = self._is_last(steps_done), self.control.take_save()
        if saved:
            self.saves.complete(steps_done, is_best)
        elif is_asked or due(steps_done, section.every) or last or is_best:
            self.saves.save(steps_done, is_best)
        self.saves.export_best(steps_done)
        self.saves.export(steps_done, last)

    def close(self) -> None:
        """Export the model of a finished run, report how the run ended, release everything."""
        for causes in filter(None, (failures.by_cause() for failures in self.failures)):
            self.progress.note(causes)
        try:
            if self.status != "failed":
                if self.status == "finished" and not self.state.updates:
                    self.status = "failed"
                    failed = "".join(f"\n{f}; the first: {f.first}" for f in self.failures if f.failed)
                    raise TrainingError(
                        f"the run made {self.steps_done} {'step' if self.steps_done == 1 else 'steps'} and not one "
                        f"update: {left_out(self.left_out) or 'every step was empty or skipped'}. Look at "
                        f"stream/unscored, stream/filtered, stream/failed_groups and */skipped in metrics.jsonl{failed}"
                    )
                self._publish()
        finally:
            error = sys.exception()
            self.resources.callback(self.progress.close)
            self.resources.callback(self.reports.end, self.status)
            self.resources.callback(self._record_end, error)
            try:
                self.resources.close()  # calls all callbacks, the latest first, even if one raises
            except Exception as failure:
                if error is None:
                    raise
                self.progress.note(str(failure))  # the error that ended the run is shown at the end

    def _publish(self) -> None:
        """Write the final models. A run that cannot write them has failed."""
        finished, self.status = self.status, "failed"
        self.saves.publish()
        self.status = finished

    def _record_end(self, error: BaseException | None) -> None:
        """Write to the manifest how the run ended."""
        failure = "" if error is None else f"{type(error).__name__}: {error}"
        reason = {"finished": "", "stopped": self.stop.reason or self._no_patience, "failed": failure}[self.status]
        with suppress(OSError, RlhfError):  # on a full disk, the error that ended the run is shown instead
            self.directory.write_end(self.status, reason, self.progress.notes)

    def _catch_up(self, step: int) -> None:
        """Advance the learning-rate schedules if the step took fewer optimizer steps than planned, because its batch
        was empty or too small for all minibatches."""
        for name, count in self.schedule.planned[step].items():
            self.roles[name].catch_up(count)

    def _adapt(self, step: int, batch: Batch, metrics: Metrics) -> Metrics:
        """The algorithm's metrics after its updates. Counts the step if an update changed weights."""
        # A role has a gradient norm if at least one of its optimizer steps was not skipped.
        self.state.updates += any(f"{role}/grad_norm" in metrics for role in self.state.trained_roles)
        label = f"finish() of algorithm {self.algorithm.name!r}"
        with boundary(TrainingError, label):
            adapted = metrics_of(label, self.algorithm.finish(step, batch, metrics))
        self.reports.name_uncovered({name: self.roles[name] for name in self.state.trained_roles}, metrics)
        return adapted

    def _evaluates(self, steps_done: int) -> bool:
        """Whether there is an evaluation after step ``steps_done``."""
        return self.evaluation is not None and (
            due(steps_done, self.config.eval.every) or steps_done == self.total_steps
        )

    def _is_last(self, steps_done: int) -> bool:
        """Whether no step follows after step ``steps_done``."""
        return steps_done == self.total_steps or self._stopping

    def _evaluate(self, evaluation: Evaluation, steps_done: int) -> Metrics:
        """The metrics of the current weights, after step ``steps_done``, on held-out rows."""
        with self.timed("evaluate"):
            metrics = evaluation.compute(steps_done)
        with boundary(TrainingError, f"evaluated() of algorithm {self.algorithm.name!r}"):
            self.algorithm.evaluated(metrics)
        return metrics

    def _stops(self, steps_done: int) -> bool:
        """Whether the run ends after step ``steps_done`` although more steps are planned."""
        last = self.config.run.stop_after
        if steps_done == self.total_steps:
            return False
        if last is not None and steps_done >= last and not self.stop.requested:
            self.stop.request(f"run.stop_after = {last}")
        if not self.stop.requested and self._no_patience:
            self.progress.note(f"stopped early: {self._no_patience}")
        return self.stop.requested or bool(self._no_patience)

    @property
    def _no_patience(self) -> str:
        """Why evaluations end the run (``eval.patience``); empty if they do not."""
        return self.evaluation.best.why_exhausted if self.evaluation is not None else ""


@dataclass(kw_only=True)
class OnlineRun(Run):
    """A run that learns from its own samples."""

    sampler: Sampler
    stream: Stream
    """The training batches."""

    def trains_on(self, version: int) -> bool:
        return self.stream.samples_with(version)
