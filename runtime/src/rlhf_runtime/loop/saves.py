"""The checkpoints and exports of a run: those that are due and, after a failure, a checkpoint of the last finished
step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.errors import RlhfError
from rlhf.interfaces import Algorithm

from rlhf_runtime.checkpoint import CheckpointStore
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.loop.checkpoint_state import RunState, State
from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.loop.model_files import ModelFiles
from rlhf_runtime.loop.reports import Reports
from rlhf_runtime.observe.progress import Progress
from rlhf_runtime.observe.run_directory import RunDirectory


class Saves:
    """Writes checkpoints, from which a run can continue, and models.

    Args:
        meta: stored in every checkpoint; it must agree for a resume to be the same run.
        take_devices_back: called before weights are saved, because they may be offloaded while the generator uses the
            devices.
    """

    def __init__(
        self,
        config: RunFile,
        algorithm: Algorithm,
        state: RunState,
        store: CheckpointStore,
        meta: Mapping[str, Any],
        directory: RunDirectory,
        reports: Reports,
        progress: Progress,
        take_devices_back: Callable[[], None],
    ) -> None:
        self._config, self._state, self._store, self._meta = config, state, store, meta
        self._directory, self._reports, self._progress = directory, reports, progress
        self._take_devices_back = take_devices_back
        self._files = ModelFiles(config, algorithm, state.data.template)
        self._intact: State | None = None
        """The state of the last finished step, until it is in a checkpoint."""
        self._intact_changes = 0
        """:meth:`_changes` at that moment. A larger value later means that the weights have changed since."""
        self._intact_best: Mapping[str, Any] | None = None
        """The best metric and its value, if this step has it."""

    def hold(self, steps_done: int, best: bool = False, unevaluated: Metrics | None = None) -> None:
        """Remember the state after step ``steps_done``, so that :meth:`rescue` can save it.

        Args:
            unevaluated: the step's metrics, before the evaluation that follows it.
        """
        self._intact, self._intact_changes = self._state.collect(steps_done, unevaluated), self._changes()
        self._intact_best = self._mark() if best else None

    def save(self, step: int, best: bool = False) -> None:
        """A complete checkpoint after ``step`` finished steps, or an error that leaves the old ones intact."""
        state, self._intact = self._state, None
        self._take_devices_back()
        mark = self._mark() if best else None
        with self._reports.timed("save"):
            path = self._store.save(step, lambda folder: state.write(folder, step), self._meta, mark)
        self._reports.timeline.instant("checkpoint", step=step)
        self._reports.observe("checkpoint_saved", step, path)

    def complete(self, step: int, best: bool) -> None:
        """Mark the checkpoint of ``step``, which was saved before its evaluation, if the evaluation is the best."""
        self._intact = None
        if best:
            self._store.mark_best(step, **self._mark())

    def export(self, steps_done: int, last: bool) -> None:
        """Export the model after step ``steps_done``, if an export is due. After a resume it may exist.

        Args:
            last: this is the run's last step, so the final model is the same.
        """
        section = self._config.checkpoint
        path, every = self._directory.exports(steps_done), section.export_every
        if last or not steps_done or every is None or steps_done % every:
            return
        with self._store.writing(path), self._reports.timed("export"):
            self._directory.export(steps_done, self.write_model, section.keep)

    def export_best(self, steps_done: int) -> None:
        """Export the model after step ``steps_done``, if its evaluation is the best. After a resume it may exist."""
        section, best = self._config.checkpoint, self._state.best
        if not (section.save_best and section.export_best) or best is None or best.step != steps_done:
            return
        if self._directory.exported_best() == steps_done:
            return
        self._take_devices_back()
        with self._store.writing(self._directory.best_model), self._reports.timed("export"):
            self._directory.publish_best(steps_done, self._mark(), self.write_model)

    def write_model(self, path: Path) -> None:
        """Write the policy (:meth:`ModelFiles.write_policy`)."""
        self._files.write_policy(self._state.roles["policy"], path)

    def publish(self) -> None:
        """Write the final model and, with ``checkpoint.export_trained``, those of the other trained roles."""
        with self._store.writing(self._directory.model), self._reports.timed("export"):
            self._directory.publish_model(self.write_model)
        others = [name for name in self._state.trained_roles if name != "policy"]
        for name in others if self._config.checkpoint.export_trained else ():
            with self._store.writing(self._directory.model_of(name)), self._reports.timed("export"):
                self._directory.publish_model(partial(self._files.write_role, self._state.roles[name]), name)

    def rescue(self) -> None:
        """After a failure, save the last finished step if the weights have not changed since, so that nothing is lost
        when a row, a reward or an environment fails. The failure remains the error that is shown."""
        state, self._intact, best = self._intact, None, self._intact_best
        if state is None or self._changes() != self._intact_changes:
            return
        try:
            self._take_devices_back()
            self._store.save(state.step, lambda folder: self._state.write(folder, state.step, state), self._meta, best)
        except RlhfError as error:
            self._progress.note(f"what was learnt since the last checkpoint is lost: {error}")
        else:
            steps = "1 step" if state.step == 1 else f"{state.step} steps"
            self._progress.note(f"saved what was learnt in {steps}; continue with --resume")

    def _mark(self) -> dict[str, Any]:
        """The best metric so far and its value."""
        best = self._state.best
        return {"metric": best.metric, "value": best.value} if best is not None else {}

    def _changes(self) -> int:
        """Number of changes, or possible changes, of roles' weights."""
        return sum(role.changes for role in self._state.roles.values())
