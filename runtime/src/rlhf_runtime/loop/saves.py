"""The checkpoints and exports of a run. Checkpoints are saved when they are due and, after a failure, for the last
finished step. :class:`ModelFiles` writes a trained role as a model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.errors import DataError, RlhfError
from rlhf.interfaces import Algorithm
from rlhf.steps import STEP_SEPARATOR
from rlhf_hub.published import add_older_names

from rlhf_runtime.checkpoint.json_values import read_json, write_json
from rlhf_runtime.checkpoint.store import CheckpointStore
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.prompts import Prompts
from rlhf_runtime.loop.checkpoint_state import RunState, State
from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.loop.model_card import write_card
from rlhf_runtime.loop.reports import Reports
from rlhf_runtime.loop.schedule import due
from rlhf_runtime.models.roles import Role
from rlhf_runtime.observe.progress import Progress
from rlhf_runtime.output.run_directory import RunDirectory


class Saves:
    """Writes checkpoints, from which a run can continue, and models.

    Args:
        meta: stored in every checkpoint. A resume compares it to check that it continues the same run.
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
        """:meth:`_changes` when ``_intact`` was set. A larger value means that the weights have changed since."""
        self._intact_best: Mapping[str, Any] | None = None
        """The best metric and its value, if this step has it."""

    def hold(self, steps_done: int, best: bool = False, unfinished: Metrics | None = None) -> None:
        """Remember the state after step ``steps_done``, so that :meth:`rescue` can save it.

        Args:
            unfinished: the step's metrics, if its sync, its evaluation or an observer may still fail.
        """
        self._intact, self._intact_changes = self._state.collect(steps_done, unfinished), self._changes()
        self._intact_best = self._mark() if best else None

    def save(self, step: int, best: bool = False) -> None:
        """Save a checkpoint after ``step`` finished steps. An error leaves older checkpoints intact."""
        # Cleared before the save, so that rescue() does not repeat a save that failed, such as on a full disk.
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
        if last or not steps_done or not due(steps_done, section.export_every):
            return
        with self._store.writing(self._directory.exports(steps_done)), self._reports.timed("export"):
            self._directory.export(steps_done, self.write_model, section.keep, self._progress.note)

    def export_best(self, steps_done: int) -> None:
        """Export the model after step ``steps_done``, if its evaluation is the best. After a resume it may exist."""
        section, best = self._config.checkpoint, self._state.best
        if not (section.save_best and section.export_best) or best is None or best.step != steps_done:
            return
        if self._directory.exported_best() == steps_done:
            return
        with self._store.writing(self._directory.best_model), self._reports.timed("export"):
            self._directory.publish_best(steps_done, self._mark(), self.write_model)

    def write_model(self, path: Path) -> None:
        """Write the policy (:meth:`ModelFiles.write_policy`), with a model card."""
        self._take_devices_back()
        self._files.write_policy(self._state.roles["policy"], path)
        write_card(path, self._directory.path)

    def publish(self) -> None:
        """Write the final policy and, with ``checkpoint.export_trained``, the models of the other trained roles."""
        with self._store.writing(self._directory.model), self._reports.timed("export"):
            self._directory.publish_model(self.write_model)
        other_roles = [name for name in self._state.trained_roles if name != "policy"]
        for name in other_roles if self._config.checkpoint.export_trained else ():
            with self._store.writing(self._directory.model_of(name)), self._reports.timed("export"):
                self._directory.publish_model(partial(self._write_role, name), name)

    def _write_role(self, name: str, path: Path) -> None:
        self._take_devices_back()
        self._files.write_role(self._state.roles[name], path)
        write_card(path, self._directory.path, name)

    def rescue(self) -> None:
        """After a failure, save the last finished step if the weights have not changed since. So nothing is lost when a
        row, a reward or an environment fails. The run still ends with the original error."""
        state, self._intact, best = self._intact, None, self._intact_best
        # The state was copied, but weights are read when they are saved, so they must still be those of the step.
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


CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""transformers and vLLM read this file before the template in the tokenizer's config."""
NAMED_TEMPLATES, PROCESSOR_TEMPLATE = "additional_chat_templates", "chat_template.json"
"""A tokenizer's other templates, and the template of an older processor. Another template replaces the default one if
it has its name or if there are tools."""
GENERATION_CONFIG = "generation_config.json"
ADAPTER = "adapter"
"""The folder of a role's adapters in PEFT's form, which its trainer writes into an export."""


class ModelFiles:
    """Writes the models of a run. Made before the first step.

    Args:
        template: how the run's rows become tokens.
    """

    def __init__(self, config: RunFile, algorithm: Algorithm, template: Prompts) -> None:
        self._config, self._algorithm, self._template = config, algorithm, template
        self._end_tokens: tuple[int, ...] = ()
        """Tokens that end an answer of the data, in addition to the model's end tokens."""
        with suppress(DataError):  # a template may refuse a conversation without a system message; rows have theirs
            self._end_tokens = template.end_token_ids

    def write_policy(self, policy: Role, path: Path) -> None:
        """Write the policy, or its moving average if one is kept, in Hugging Face format. ``config.json`` contains the
        algorithm's ``model_config`` and, if rows were solutions in steps, the separator of steps. A chat template that
        the run file names replaces all of the tokenizer's own."""
        self._write(policy, path)
        model_config = self._algorithm.model_config()
        if self._algorithm.data == "steps":
            model_config = {STEP_SEPARATOR: self._config.data.step_separator, **model_config}
        old_config = read_json(path / "config.json")
        # The separator of the model that the run started from marks a process reward model.
        new_config = {name: value for name, value in old_config.items() if name != STEP_SEPARATOR} | model_config
        if new_config != old_config:
            write_json(path / "config.json", new_config)
        _complete_adapter(path)

    def write_role(self, role: Role, path: Path) -> None:
        """Write a trained role in Hugging Face format. If it trains adapters, they are also written in PEFT's format in
        a subfolder. If it generates text, its generation config gets every end token of the run."""
        self._write(role, path)
        _complete_adapter(path)

    def _write(self, role: Role, path: Path) -> None:
        role.every("export", path, "ema" if "ema" in role.facts.views else "live")
        add_older_names(path)
        if (path / GENERATION_CONFIG).is_file():
            _add_end_tokens(path / GENERATION_CONFIG, (*role.facts.eos_token_ids, *self._end_tokens))
        if self._config.data.chat_template is not None:
            template: str = self._template.tokenizer.chat_template
            (path / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
            shutil.rmtree(path / NAMED_TEMPLATES, ignore_errors=True)
            (path / PROCESSOR_TEMPLATE).unlink(missing_ok=True)


def _complete_adapter(path: Path) -> None:
    """Copy the settings of the model to the adapter in an export, so that the adapter's folder can be used as a
    model."""
    for file in path.iterdir() if (path / ADAPTER).is_dir() else ():
        # `in`, because the index of divided weights (model.safetensors.index.json) is left out, too.
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copyfile(file, path / ADAPTER / file.name)


def _add_end_tokens(generation_config: Path, tokens: Iterable[int]) -> None:
    """Append ``tokens`` to the end tokens of a generation config."""
    config = read_json(generation_config)
    old_tokens = config.get("eos_token_id")
    old_tokens = old_tokens if isinstance(old_tokens, list) else [] if old_tokens is None else [old_tokens]
    ends = list(dict.fromkeys([*old_tokens, *tokens]))
    if ends != old_tokens:
        write_json(generation_config, {**config, "eos_token_id": ends})
