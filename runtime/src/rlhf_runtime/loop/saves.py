"""The checkpoints and exports of a run: those that are due, and after a failure the last finished step, which is in no
checkpoint yet."""

from __future__ import annotations

from pathlib import Path

from rlhf.errors import RlhfError
from rlhf.steps import STEP_SEPARATOR

from rlhf_runtime.checkpoint import read_json, write_json
from rlhf_runtime.loop.built import Built
from rlhf_runtime.loop.checkpoint_state import State, collect_state, write_state

CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""Read by transformers and vLLM before what the tokenizer's config says."""


class Saves:
    """Writes what a run can go on from, and what it leaves."""

    def __init__(self, run: Built) -> None:
        self._run = run
        self._intact: State | None = None
        """The state of the last finished step, as long as it is in no checkpoint."""
        self._intact_changes = 0
        """:meth:`_changes` then: where more were made since, the weights are no longer its own."""

    def hold(self, done: int) -> None:
        """``done`` steps are whole: until they are in a checkpoint, :meth:`rescue` can save them."""
        self._intact, self._intact_changes = collect_state(self._run, done), self._changes()

    def save(self, step: int, best: bool = False) -> None:
        """A complete checkpoint of now, after ``step`` finished steps, or an error and the old ones intact."""
        run, self._intact = self._run, None
        run.take_devices_back()
        mark = {"metric": run.best.metric, "value": run.best.value} if best and run.best is not None else None
        path = run.store.save(step, lambda folder: write_state(run, step, folder), run.meta, mark)
        run.reports.observe("checkpoint_saved", step, path)

    def export(self, done: int, last: bool) -> None:
        """The model after ``done`` steps, beside the final one, where it is due and not there yet.

        Args:
            last: no step comes after them, so the final model is this one.
        """
        run, section = self._run, self._run.config.checkpoint
        path, every = run.directory.exports(done), section.export_every
        if last or not done or every is None or done % every or path.exists():
            return
        with run.writing(path):
            run.directory.export(done, self.write_model, section.keep)

    def write_model(self, path: Path) -> None:
        """The policy in Hugging Face format; its moving average where one is kept. Its ``config.json`` says what the
        algorithm adds, and where rows were solutions in steps, what followed each step; a chat template that the run
        file names takes the place of the tokenizer's own."""
        run = self._run
        self.write_role("policy", path)
        own = run.algorithm.model_config()
        if run.algorithm.data == "steps":
            own = {STEP_SEPARATOR: run.config.data.step_separator, **own}
        if own:
            config = path / "config.json"
            write_json(config, {**read_json(config), **own})

    def write_role(self, name: str, path: Path) -> None:
        """A trained role in Hugging Face format."""
        run, role = self._run, self._run.roles[name]
        role.every("export", path, "ema" if "ema" in role.facts.views else "live")
        if run.config.data.chat_template is not None:
            (path / CHAT_TEMPLATE_FILE).write_text(run.data.template.tokenizer.chat_template, encoding="utf-8")

    def rescue(self) -> None:
        """After a failure: save the last finished step where the weights are still its own, so that nothing is lost
        when a row, a reward or an environment fails. The failure remains the error to show."""
        run, state, self._intact = self._run, self._intact, None
        if state is None or self._changes() != self._intact_changes:
            return
        try:
            run.take_devices_back()
            run.store.save(state.step, lambda folder: write_state(run, state.step, folder, state), run.meta)
        except RlhfError as error:
            run.progress.note(f"what was learnt since the last checkpoint is lost: {error}")
        else:
            run.progress.note(f"saved what was learnt in {state.step} steps; continue with --resume")

    def _changes(self) -> int:
        """How often weights of a role were changed, or may have been."""
        return sum(role.changes for role in self._run.roles.values())
