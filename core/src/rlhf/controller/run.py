"""A run: the parts that the controllers use and what surrounds a step, from the first step to the last line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.checkpoint import CheckpointStore, read_json, write_json
from rlhf.controller.learn import Metrics
from rlhf.controller.phases import Phases
from rlhf.controller.roles import Role
from rlhf.controller.state import State, collect_state, write_state
from rlhf.controller.stream import ReadyBatch, Stream
from rlhf.controller.sync import WeightSync
from rlhf.data.dataset import TrainData
from rlhf.data.rows import Example
from rlhf.errors import RlhfError, TrainingError, boundary
from rlhf.interfaces import Algorithm, Component, Launcher, Observer, Reward, RunInfo
from rlhf.observe.best import BestTracker
from rlhf.observe.progress import Progress
from rlhf.observe.rundir import RunDirectory
from rlhf.observe.signals import StopRequest
from rlhf.ops.batch import Batch
from rlhf.runfile import RunFile
from rlhf.serialise import write_groups


@dataclass
class Run:
    """Made by :func:`rlhf.controller.build.build`."""

    config: RunFile
    meta: Mapping[str, Any]
    """Goes into every checkpoint: what must agree for a resume to be the same run."""
    algorithm: Algorithm
    roles: dict[str, Role]
    data: TrainData
    launcher: Launcher
    directory: RunDirectory
    store: CheckpointStore
    progress: Progress
    total_steps: int
    snapshots: frozenset[str] = frozenset()
    stream: Stream | None = None
    weights: WeightSync | None = None
    """Takes the policy's weights to the generator, where there is one."""
    phases: Phases | None = None
    """Who has the devices that the generator shares, where there is one."""
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    observers: Mapping[str, Observer] = field(default_factory=dict)
    evaluate: Callable[[], Metrics] | None = None
    best: BestTracker | None = None
    first_step: int = 0
    closers: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seed = self.config.run.seed
        self.trained_roles = tuple(name for name, role in self.roles.items() if role.spec.role.trained)
        self.saved_roles = tuple(name for name in self.roles if name in (*self.trained_roles, *self.snapshots))
        self.stop = StopRequest()
        self.updates = 0
        """Steps that changed weights, those before a resume included."""
        self.done = 0
        """Finished steps, those before a resume included."""
        self.status = "failed"
        self._started = time.perf_counter()
        self._times: dict[str, float] = {}
        self._stopping = False
        self._covered: set[str] = set()
        self._intact: State | None = None
        """The state of the last finished step, as long as it is in no checkpoint."""
        self._intact_changes = 0
        """:meth:`_changes` then: where more were made since, the weights are no longer its own."""

    # ------------------------------------------------------------------------------- around the steps

    def steps(self) -> Iterator[int]:
        """Steps from where the last checkpoint stood. Ends early after a signal (a checkpoint is saved first) or when
        evaluation has not improved for ``eval.patience`` evaluations."""
        info = RunInfo(
            self.config.run.name or Path(self.config.run.output).name,
            self.directory.path,
            self.config.model_dump(mode="json"),
            self.total_steps,
            self.first_step,
        )
        self.progress.begin(self.first_step)
        self._observe("run_started", info)
        if self.config.eval.at_start and self.first_step == 0 and self.evaluate is not None:
            with self.timed("evaluate"):
                metrics = self.evaluate()
            self.algorithm.evaluated(metrics)
            self._record(0, metrics)
            self._tell(0, metrics)
        self.done = self.first_step
        self._stopping = self._is_exhausted()  # the process died between the last checkpoint and the end
        with self.stop:
            while self.done < self.total_steps and not self._stopping:
                self._times = {}
                self._started = time.perf_counter()
                yield self.done
        self.status = "finished" if self.done == self.total_steps else "stopped"

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Wall time of a phase of this step, reported as ``time/<phase>`` (seconds)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._times[phase] = self._times.get(phase, 0.0) + time.perf_counter() - start

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The phase that draws and scores samples: batch after batch, refills among them."""
        with self.timed("generate"), self.phases.together() if self.phases is not None else nullcontext():
            yield

    @contextmanager
    def learning(self) -> Iterator[None]:
        """The phase that changes weights."""
        self._take_devices_back()
        with self.timed("learn"):
            yield

    def sync(self, version: int) -> Metrics:
        """Weights of the policy go to the generator, which samples with ``version`` from now on; nothing moves where
        nobody would sample with them: inside a round, without an evaluation."""
        assert self.weights is not None
        used = self.stream is None or self.stream.samples_with(version) or self._evaluates(version)
        if not used and version != self.first_step:  # a start always syncs: the generator has no weights of the run yet
            return {}
        if self.phases is not None:
            self.phases.begin_sync()
        return self.weights.push(version)

    def examples(self, step: int) -> list[Example]:
        """The tokenised rows of this (offline) step."""
        return self.data.examples(self.data.take(self.config.data.batch_size))

    def nothing_to_learn(self, step: int) -> Metrics:
        """A step whose rows or groups held nothing to learn from: counted, nothing is updated."""
        self.progress.note(f"step {step + 1}: nothing to learn from, no update")
        return {"empty": 1.0}

    def keep_skipped(self, reason: str, batch: Batch) -> None:
        """Keep the batch of a skipped optimizer step for study, and say so."""
        path = self.directory.keep_batch(reason, batch)
        self.progress.note(f"optimizer step skipped ({reason}); its batch is kept in {path}")

    def finish(self, step: int, metrics: Metrics, ready: ReadyBatch | None = None) -> None:
        """After learning: adapt, evaluate, write the step's line, tell the observers, save a checkpoint if due."""
        done = step + 1
        if "empty" not in metrics:
            # a role has a gradient norm where at least one of its optimizer steps was not skipped
            self.updates += any(f"{role}/grad_norm" in metrics for role in self.trained_roles)
            metrics |= self.algorithm.finish(step, metrics)
            self._report_coverage()
        if ready is not None:
            metrics |= {f"stream/{name}": value for name, value in ready.counts.items()}
            metrics["stream/version"] = float(ready.version)
            if self.config.checkpoint.save_rollouts:
                with self.writing(path := self.directory.rollouts(done)):
                    write_groups(path, ready.groups, self.data.template.prompt_of)
            self._observe("rollouts_finished", done, ready.groups)
        metrics["epoch"] = self.data.epoch
        if self.config.data.too_long == "drop":
            metrics["data/dropped"] = float(self.data.dropped)
        if self.config.data.bad_rows == "drop":
            metrics["data/bad_rows"] = float(self.data.bad_rows)
        is_best = False
        if self._evaluates(done):
            try:
                is_best = self._evaluate(done, metrics)
            except Exception:  # the step itself is whole: without the numbers of its evaluation it can be saved
                self._record(done, metrics)
                self._hold(done)
                raise
        self._record(done, metrics)
        self._hold(done)
        self._tell(done, metrics)
        # Read once: a signal that comes later finds another step, after which there is a checkpoint too.
        self._stopping = self.stop.requested or self._is_exhausted()
        last, section = done == self.total_steps or self._stopping, self.config.checkpoint
        if _due(done, section.every) or last or (is_best and section.save_best):
            self.save(done, best=is_best and section.save_best)
        if _due(done, section.export_every) and not last:
            with self.writing(self.directory.exports(done)):
                self.directory.export(done, self.export, section.keep)

    def save(self, step: int, best: bool = False) -> None:
        """A complete checkpoint, or an error and the old ones intact."""
        self._intact = None
        self._take_devices_back()
        mark = {"metric": self.best.metric, "value": self.best.value} if best and self.best is not None else None
        path = self.store.save(step, lambda folder: write_state(self, step, folder), self.meta, mark)
        self._observe("checkpoint_saved", step, path)

    def rescue(self) -> None:
        """After a failure: save the last finished step where the weights are still its own, so that nothing is lost
        when a row, a reward or an environment fails. The failure remains the error to show."""
        state, self._intact = self._intact, None
        if state is None or self._changes() != self._intact_changes:
            return
        try:
            self._take_devices_back()
            self.store.save(state.step, lambda folder: write_state(self, state.step, folder, state), self.meta)
        except RlhfError as error:
            self.progress.note(f"what was learnt since the last checkpoint is lost: {error}")
        else:
            self.progress.note(f"saved what was learnt in {state.step} steps; continue with --resume")

    def writing(self, path: Path) -> AbstractContextManager[None]:
        """Turn a full disk into an error that says what is left of the run."""
        return self.store.writing(path)

    def export(self, path: Path) -> None:
        """The policy in Hugging Face format; its moving average where one is kept."""
        policy = self.roles["policy"]
        policy.every("export", path, "ema" if "ema" in policy.facts.views else "live")
        if own := self.algorithm.model_config():
            config = path / "config.json"
            write_json(config, {**read_json(config), **own})

    def close(self) -> None:
        """Export the model of a finished run, say how it ended, release everything."""
        try:
            if self.status != "failed":
                if self.status == "finished" and not self.updates:
                    self.status = "failed"
                    raise TrainingError(
                        f"the run made {self.done} steps and not one update: every step was empty or skipped. Look at "
                        "stream/filtered, stream/failed_groups and */skipped in metrics.jsonl"
                    )
                with self.writing(self.directory.model):
                    self.directory.publish_model(self.export)
        finally:
            with ExitStack() as closing:  # the last one in is called first; each is, whatever another raises
                for closer in (self.directory.close, self.launcher.shutdown, *reversed(self.closers)):
                    closing.callback(closer)
                closing.callback(self.progress.close)
                closing.callback(self._observe, "run_ended", self.status)

    # -------------------------------------------------------------------------------------- parts

    def _evaluates(self, done: int) -> bool:
        """Whether there is an evaluation after so many steps."""
        return self.evaluate is not None and (_due(done, self.config.eval.every) or done == self.total_steps)

    def _hold(self, done: int) -> None:
        """``done`` steps are whole: until they are in a checkpoint, :meth:`rescue` can save them."""
        self.done, self._intact, self._intact_changes = done, collect_state(self, done), self._changes()

    def _changes(self) -> int:
        """How often weights of a role were changed, or may have been."""
        return sum(role.changes for role in self.roles.values())

    def _evaluate(self, done: int, metrics: Metrics) -> bool:
        """Evaluate the weights of now, add the numbers to ``metrics``; whether they are the best so far."""
        assert self.evaluate is not None
        with self.timed("evaluate"):
            found = self.evaluate()
        self.algorithm.evaluated(found)
        metrics |= found
        return self.best is not None and self.best.update(done, metrics)[0]

    def _take_devices_back(self) -> None:
        """Trainers learn, and save, with everything where it belongs."""
        if self.phases is not None:
            self.phases.begin_learning()

    def _is_exhausted(self) -> bool:
        """Whether evaluation has not improved for ``eval.patience`` evaluations; says so."""
        if self.best is None or not self.best.exhausted:
            return False
        self.progress.note(
            f"stopped early: {self.best.metric} has not improved for {self.best.waited} evaluations; the best, "
            f"{self.best.value}, was after step {self.best.step}"
        )
        return True

    def stateful(self) -> dict[str, Component]:
        """Every component whose state is in the checkpoint, by a stable name."""
        parts: dict[str, Component] = {"algorithm": self.algorithm}
        parts |= {f"algorithm.{slot}": part for slot, part in self.algorithm.parts.items()}
        parts |= {f"reward.{name}": reward for name, reward in self.rewards.items()}
        return parts | {f"observer.{name}": observer for name, observer in self.observers.items()}

    def _record(self, done: int, metrics: Metrics) -> None:
        if self._times:
            metrics |= {f"time/{phase}": seconds for phase, seconds in self._times.items()}
            metrics["time/step"] = time.perf_counter() - self._started
        with self.writing(self.directory.metrics.path):
            self.directory.metrics.append(done, metrics)

    def _tell(self, done: int, metrics: Metrics) -> None:
        self._observe("step_finished", done, metrics)
        self.progress.step(done, metrics)

    def _observe(self, event: str, *arguments: Any) -> None:
        for name, observer in self.observers.items():
            with boundary(RlhfError, f"observer {name!r}, {event}"):
                getattr(observer, event)(*arguments)

    def _report_coverage(self) -> None:
        """After a role's first update: parameters that got no gradient or did not move are named once."""
        for name in self.trained_roles:
            if name in self._covered:
                continue
            report: Mapping[str, Sequence[str]] = self.roles[name].every("coverage")[0]
            if not report:  # not updated yet
                continue
            self._covered.add(name)
            for what, parameters in report.items():
                if parameters:
                    shown = ", ".join(parameters[:5]) + (", ..." if len(parameters) > 5 else "")
                    self.progress.note(f"{name}: {len(parameters)} parameters {what} after the first update: {shown}")


def _due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0
