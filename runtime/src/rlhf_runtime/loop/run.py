"""A run: what surrounds a step, from the first one to the last line of the run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from rlhf.errors import RlhfError, TrainingError
from rlhf.interfaces import RunInfo
from rlhf.ops.batch import Batch
from rlhf.types.examples import Example

from rlhf_runtime.checkpoint.saved_groups import write_groups
from rlhf_runtime.loop.built import Built
from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.loop.saves import Saves
from rlhf_runtime.observe.source_rewards import source_metrics
from rlhf_runtime.samples.stream import ReadyBatch, left_out


class Run(Built):
    """Made by ``build.build``. A controller takes :meth:`steps` and ends each in :meth:`finish`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seed = self.config.run.seed
        self.done = 0
        """Finished steps, those before a resume included."""
        self.status = "failed"
        self.left_out: Counter[str] = Counter()
        """Of the steps with nothing to learn from: the sum of their :attr:`ReadyBatch.counts`."""
        self.saves = Saves(self)
        self._stopping = False
        self._no_patience = ""
        """Which evaluations ended the run, where they did (``eval.patience``)."""

    # ------------------------------------------------------------------------------- around the steps

    def steps(self) -> Iterator[int]:
        """Steps from where the last checkpoint stood. Ends early after a signal (a checkpoint is saved first) or when
        evaluation has not improved for ``eval.patience`` evaluations."""
        name = self.config.run.name or Path(self.config.run.output).name
        settings = self.config.model_dump(mode="json")
        info = RunInfo(name, self.directory.path, settings, self.total_steps, self.first_step, self.control)
        self.progress.begin(self.first_step)
        self.reports.observe("run_started", info)
        self.control.apply()
        if self.config.eval.at_start and self.first_step == 0 and self.evaluate is not None:
            metrics = self._evaluate(self.evaluate)
            self.reports.record(0, metrics)
            self.reports.tell(0, metrics)
        self.done = self.first_step
        # A process that died between the last checkpoint and the end of its run left the rest to the resume.
        self._stopping = self.stop.requested or self._is_exhausted()
        self.saves.export(self.done, last=self._is_last(self.done))
        with self.stop:
            while self.done < self.total_steps and not self._stopping:
                self.reports.begin_step()
                yield self.done
        self.status = "finished" if self.done == self.total_steps else "stopped"

    @property
    def exit_code(self) -> int:
        """0; 128 + the number of the signal that ended the run before its last step, as shells count: what comes after
        `rlhf train ... &&` is not to find half of a model."""
        return 128 + self.stop.signal if self.status == "stopped" and self.stop.signal else 0

    @property
    def outcome(self) -> str:
        """The status, with the samples that failed."""
        return ", ".join([self.status, *(str(f) for f in self.failures if f.failed)])

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Wall time of a phase of this step, reported as ``time/<phase>`` (seconds)."""
        return self.reports.timed(phase)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The phase that draws and scores samples: batch after batch, refills among them."""
        with self.timed("generate"), self.phases.together() if self.phases is not None else nullcontext():
            yield

    @contextmanager
    def learning(self, step: int) -> Iterator[None]:
        """The phase that changes weights."""
        self.take_devices_back()
        with self.timed("learn"):
            yield
        self._catch_up(step)

    def sync(self, version: int) -> Metrics:
        """Weights of the policy go to the generator, which samples with ``version`` from now on; nothing moves where
        nobody would sample with them: inside a round, or from given rows, without an evaluation."""
        assert self.weights is not None
        trained_on = self.stream is not None and self.stream.samples_with(version)
        used = trained_on or self._evaluates(version)
        if not used and version != self.first_step:  # a start always syncs: the generator has no weights of the run yet
            return {}
        if self.phases is not None:
            self.phases.begin_sync()
        return self.weights.push(version)

    def next_examples(self) -> list[Example]:
        """The tokenised rows of an offline step."""
        return self.data.examples(self.data.take(self.config.data.batch_size))

    def nothing_to_learn(self, step: int, ready: ReadyBatch | None = None) -> Metrics:
        """A step whose rows or groups held nothing to learn from: it is counted, and no weight changes."""
        self._catch_up(step)
        counts = ready.counts if ready is not None else {}
        self.left_out.update(counts)
        why = left_out(counts)
        self.progress.note(f"step {step + 1}: nothing to learn from, no update{why and f': {why}'}")
        return {"empty": 1.0}

    def keep_skipped(self, reason: str, batch: Batch) -> None:
        """Keep the batch of a skipped optimizer step for study, and say so."""
        path = self.directory.keep_batch(self.done + 1, reason, batch)
        self.progress.note(f"optimizer step skipped ({reason}); its batch is kept in {path}")

    def finish(self, step: int, batch: Batch | None, metrics: Metrics, ready: ReadyBatch | None = None) -> None:
        """After learning: adapt, evaluate, write the step's line, tell the observers, save a checkpoint if due.

        Args:
            batch: what the step learnt from; None where there was nothing to learn from.
            ready: the samples of an online step.
        """
        done = step + 1
        if batch is not None:
            metrics |= self._adapt(step, batch, metrics)
        if ready is not None:
            metrics |= self._keep_rollouts(done, ready)
        metrics["epoch"] = self.data.epoch
        if self.config.data.too_long == "drop":
            metrics["data/dropped"] = float(self.data.dropped)
        if self.config.data.bad_rows == "drop":
            metrics["data/bad_rows"] = float(self.data.bad_rows)
        self.done, is_best = done, False
        if self.evaluate is not None and self._evaluates(done):
            try:
                metrics |= self._evaluate(self.evaluate)
                is_best = self.best is not None and self.best.update(done, metrics)[0]
            except Exception:  # the step itself is whole: without the numbers of its evaluation it can be saved
                self.reports.record(done, metrics)
                self.saves.hold(done)
                raise
        self.reports.record(done, metrics)
        self.saves.hold(done)
        self.reports.tell(done, metrics)
        if self.control.apply():
            self.saves.hold(done)
        # Read once: a signal that comes later finds another step, after which there is a checkpoint too.
        self._stopping = self.stop.requested or self._is_exhausted()
        last, section = self._is_last(done), self.config.checkpoint
        asked = self.control.take_save()
        if asked or _due(done, section.every) or last or (is_best and section.save_best):
            self.saves.save(done, best=is_best and section.save_best)
        self.saves.export(done, last)

    def rescue(self) -> None:
        """After a failure: what was learnt since the last checkpoint is saved where that can be done."""
        self.saves.rescue()

    def close(self) -> None:
        """Export the model of a finished run, say how it ended, release everything."""
        try:
            if self.status != "failed":
                if self.status == "finished" and not self.updates:
                    self.status = "failed"
                    failed = "".join(f"\n{f}; the first: {f.first}" for f in self.failures if f.failed)
                    raise TrainingError(
                        f"the run made {self.done} steps and not one update: "
                        f"{left_out(self.left_out) or 'every step was empty or skipped'}. Look at stream/unscored, "
                        f"stream/filtered, stream/failed_groups and */skipped in metrics.jsonl{failed}"
                    )
                with self.writing(self.directory.model):
                    self.directory.publish_model(self.saves.write_model)
                others = [name for name in self.trained_roles if name != "policy"]
                for name in others if self.config.checkpoint.export_trained else ():
                    with self.writing(self.directory.model_of(name)):
                        self.directory.publish_model(partial(self.saves.write_role, name), name)
        finally:
            with ExitStack() as closing:  # the last one in is called first; each is, whatever another raises
                for closer in (self.directory.close, self.launcher.shutdown, *reversed(self.closers)):
                    closing.callback(closer)
                closing.callback(self.progress.close)
                closing.callback(self.reports.observe, "run_ended", self.status)
                closing.callback(self._record_end, sys.exception())

    # -------------------------------------------------------------------------------------- parts

    def _record_end(self, error: BaseException | None) -> None:
        """Say in the manifest how the run ended, for people who look at it later."""
        failure = "" if error is None else f"{type(error).__name__}: {error}"
        why = {"finished": "", "stopped": self.stop.reason or self._no_patience, "failed": failure}[self.status]
        with suppress(OSError, RlhfError):  # on a full disk, the error that ended the run is the one to show
            self.directory.write_end(self.status, why)

    def _catch_up(self, step: int) -> None:
        """Learning rates go on as planned where the step took fewer optimizer steps: it had nothing to learn from, or
        too little for all minibatches."""
        for name, count in self.schedule.planned[step].items():
            self.roles[name].catch_up(count)

    def _adapt(self, step: int, batch: Batch, metrics: Metrics) -> Metrics:
        """The algorithm's metrics after its updates. The step is counted where an update changed weights."""
        # A role has a gradient norm where at least one of its optimizer steps was not skipped.
        self.updates += any(f"{role}/grad_norm" in metrics for role in self.trained_roles)
        adapted = self.algorithm.finish(step, batch, metrics)
        self.reports.name_uncovered({name: self.roles[name] for name in self.trained_roles}, metrics)
        return adapted

    def _keep_rollouts(self, done: int, ready: ReadyBatch) -> Metrics:
        """Write the step's groups, where asked for, and show them to observers. Returns what became of its prompts."""
        if self.config.checkpoint.save_rollouts:
            with self.writing(path := self.directory.rollouts(done)):
                write_groups(path, ready.groups, self.data.template.prompt_of)
        if _due(done, self.config.run.show_samples):
            self.progress.samples(done, ready.groups)
        self.reports.observe("rollouts_finished", done, ready.groups)
        counts = {f"stream/{name}": value for name, value in ready.counts.items()}
        return counts | {"stream/version": float(ready.version)} | source_metrics(ready.groups)

    def _evaluates(self, done: int) -> bool:
        """Whether there is an evaluation after so many steps."""
        return self.evaluate is not None and (_due(done, self.config.eval.every) or done == self.total_steps)

    def _is_last(self, done: int) -> bool:
        """Whether no step comes after so many."""
        return done == self.total_steps or self._stopping

    def _evaluate(self, evaluate: Callable[[], Metrics]) -> Metrics:
        """What the weights of now reach."""
        with self.timed("evaluate"):
            metrics = evaluate()
        self.algorithm.evaluated(metrics)
        return metrics

    def _is_exhausted(self) -> bool:
        """Whether evaluation has not improved for ``eval.patience`` evaluations; says so."""
        if self.best is None or not self.best.exhausted:
            return False
        self._no_patience = (
            f"{self.best.metric} has not improved for {self.best.waited} evaluations; the best, {self.best.value}, was "
            f"after step {self.best.step}"
        )
        self.progress.note(f"stopped early: {self._no_patience}")
        return True


def _due(done: int, every: int | None) -> bool:
    return every is not None and done % every == 0
