"""Records the start of a run, and reads earlier runs. Checks whether a run may continue the run in its folder, restores
the checkpoint, and checks whether the samples that ``stream.replay`` names can be trained on.

A run that is resumed after an upgrade may have options that its checkpoint lacks, because the release or the plugin
that wrote the checkpoint did not have them. Such options are allowed at their defaults, which leave the run unchanged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rlhf.errors import CheckpointError, ConfigError, PluginError, RlhfError, boundary
from rlhf.interfaces import ModelSpec
from rlhf.saved import validated
from rlhf_hub.adapter_folders import adapter_of
from rlhf_hub.published import content_of

from rlhf_runtime.checkpoint.compare import Difference, SavedMeta, compare, describe, layout_of, require_same_run
from rlhf_runtime.checkpoint.store import BEST, MANIFEST, Checkpoint, CheckpointStore
from rlhf_runtime.config.load import load, to_toml
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.loop.checkpoint_state import RunState
from rlhf_runtime.loop.run import Run
from rlhf_runtime.output.metrics import recorded_steps
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_runtime.output.run_folder import check_folder, check_models, saved_state
from rlhf_runtime.setup.prepare import Prepared


def check_output(prepared: Prepared) -> list[str]:
    """Check ``run.output`` and the observers as :func:`rlhf_runtime.setup.build.build` does, with the same messages.
    Returns notes about the resume. Changes nothing in the folder.

    Raises ConfigError or CheckpointError.
    """
    run = prepared.config.run
    check_folder(run.output, run.resume, run.overwrite)
    check_latest(prepared)
    checkpoint = check_start(prepared)
    return [] if checkpoint is None else _no_steps(prepared, checkpoint.step)


def check_latest(prepared: Prepared) -> None:
    """Raises ConfigError if the path of a model contains the link ``runs/latest``, which this run moves."""
    check_models(Path(prepared.config.run.output), {name: spec.path for name, spec in prepared.specs.items()})


def check_start(prepared: Prepared) -> Checkpoint | None:
    """The checkpoint of :func:`_check_resume`. Also raises ConfigError if the samples of ``stream.replay`` cannot be
    trained on, or an observer could not start (:meth:`Observer.check`)."""
    checkpoint = _check_resume(prepared)
    _check_record(prepared)
    for name, observer in prepared.observers.items():
        with boundary(PluginError, f"observer {name!r}, check"):
            observer.check(Path(prepared.config.run.output))
    return checkpoint


def _check_resume(prepared: Prepared) -> Checkpoint | None:
    """The checkpoint from which the run continues; None if the run does not resume or has no checkpoint yet. Every file
    of the checkpoint was compared with its checksum. Changes nothing.

    Raises CheckpointError if the newest checkpoint cannot be read or belongs to another run, or if the run has saved
    something but has no checkpoint. A change of threads or device is only reported, by :func:`restore`, because both
    are known only when the models are loaded.
    """
    run = prepared.config.run
    if not run.resume:
        return None
    store = CheckpointStore(run.output)
    newest = store.newest()
    # Called for its error only, before the models are loaded.
    store.pointer()
    # `restore` reads both when it deletes the records of later steps.
    recorded_steps(Path(run.output) / "metrics.jsonl")
    RunDirectory(Path(run.output), None, resumed=True).exported_best()
    if newest is None:
        _check_unsaved(Path(run.output))
        return None
    check_steps(newest.step, prepared.total_steps)
    saved = validated(SavedMeta, newest.meta, f"{newest.path / MANIFEST}, meta")
    threads, device = saved.environment.get("threads"), saved.environment.get("device", "")
    _require_same(prepared, newest, checkpoint_metadata(prepared, threads, device))
    return store.open(newest.step)


def _require_same(prepared: Prepared, checkpoint: Checkpoint, meta: Mapping[str, Any]) -> list[str]:
    """:func:`require_same_run` with the ``meta`` of this run, whose options may be newer than the checkpoint."""
    differences = compare(checkpoint.meta, meta, _layout(prepared))
    return require_same_run(allow_defaults(differences, prepared.config, prepared.resolve), checkpoint.path)


def _check_unsaved(folder: Path) -> None:
    """Raises CheckpointError if the run in ``folder`` has saved something. Then it must have had a checkpoint, or a
    start at step 0 would delete the saved files."""
    lost = saved_state(folder)
    if (folder / "checkpoints" / BEST).exists():
        lost.append(f"checkpoints/{BEST}")
    if first := RunDirectory.last_start(folder).get("first_step"):
        lost.append(f"a start after step {first}")
    if lost:
        raise CheckpointError(
            f"there is no checkpoint in {folder / 'checkpoints'}, but {folder} holds {', '.join(lost)}, which a run "
            "from step 0 would replace. Restore the checkpoints from a copy, start another run with another --output, "
            "or start this one from the beginning with --overwrite. Nothing was changed."
        )


def check_steps(steps_done: int, total: int) -> None:
    """Raises ConfigError if a resumed run has already finished more steps than ``total``."""
    if steps_done > total:
        raise ConfigError(
            f"a run of {total} steps cannot be resumed after step {steps_done}. Steps are counted from the start of "
            f"the run, including those before the resume: set run.steps to more than {steps_done}, e.g. --steps "
            f"{steps_done + total}."
        )


def _no_steps(prepared: Prepared, steps_done: int) -> list[str]:
    """A note if ``run.stop_after`` ends the run before its next step."""
    last, total = prepared.config.run.stop_after, prepared.total_steps
    if last is None or not last <= steps_done < total:
        return []
    return [
        f"run.stop_after = {last}, but {steps_done} of {total} steps are done: this start runs no further steps. To "
        f"continue, remove it, or set it to a later step: --run.stop_after {total}"
    ]


def restore(
    prepared: Prepared,
    state: RunState,
    store: CheckpointStore,
    directory: RunDirectory,
    meta: Mapping[str, Any],
    note: Callable[[str], None],
    checkpoint: Checkpoint | None,
) -> int:
    """Load ``checkpoint``, which :func:`check_start` returned, into ``state``. Returns its step; 0 if the run has
    none.

    Raises CheckpointError if the checkpoint belongs to another run, or its content is invalid.
    """
    store.clean()
    if checkpoint is None:
        note("no checkpoint to resume from: starting at step 0")
        with store.writing(directory.path):
            directory.cut(None)
        return 0
    for line in _require_same(prepared, checkpoint, meta):
        note(line)
    step = state.read(checkpoint)
    with store.writing(directory.path):
        directory.cut(step)
    if missing := directory.metrics.missing(step if state.unfinished is None else step - 1):
        note(f"{directory.metrics.path} has no line for {missing}: it was truncated or replaced")
    note(f"resumed after step {step} from {checkpoint.path}")
    for line in _no_steps(prepared, step):
        note(line)
    return step


def allow_defaults(
    differences: Sequence[Difference], config: RunFile, resolve: Callable[[RunFile], RunFile]
) -> list[Difference]:
    """Returns ``differences`` between a checkpoint and ``config``. An option that the checkpoint lacks is marked
    ``added`` instead of refused if ``config`` has it at its default.

    Args:
        config: the run file with every option filled in.
        resolve: fills in options (:class:`rlhf_runtime.config.components.Selections`).
    """
    options = config.model_dump(mode="json")

    def at_default(key: str) -> bool:
        data = config.model_dump()
        if not _remove(data, key.split(".")):
            return False
        try:
            return resolve(RunFile.model_validate(data)).model_dump(mode="json") == options
        except (ValidationError, RlhfError):  # the option is required
            return False

    return [
        replace(d, severity="added") if d.severity == "refuse" and d.absent_before and at_default(d.key) else d
        for d in differences
    ]


def _remove(data: Any, path: list[str]) -> bool:
    """Delete the value at ``path``. Returns False if there is none."""
    *parents, last = path
    for part in parents:
        if isinstance(data, list | tuple):
            data = dict(zip(map(str, range(len(data))), data, strict=True)).get(part)
        elif isinstance(data, dict):
            data = data.get(part)
    if not isinstance(data, dict) or last not in data:
        return False
    del data[last]
    return True


SECTIONS = (
    *("algorithm", "policy", "reference", "critic", "roles", "data", "sampling", "stream", "rollout", "env", "reward"),
    "curriculum",
)
"""Sections of the run file that determine which samples are drawn and what is learnt from them. Options in them that a
resume may change, such as ``policy.micro_tokens``, may differ in a replay, too."""


def _check_record(prepared: Prepared) -> None:
    """Raises ConfigError if ``stream.replay`` names a folder without a record, a record of another run, or a record of
    too few steps."""
    config = prepared.config
    if config.stream.replay is None:
        return
    folder = Path(config.stream.replay)
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"stream.replay = {str(folder)!r} is not the folder of a run: it has no config.toml.")
    if folder.resolve() == Path(config.run.output).resolve():
        raise ConfigError(f"stream.replay and run.output are both {folder}. Set --run.output to another folder.")
    old_config = load(str(folder / "config.toml"))
    differences = compare({"config": _recorded(old_config)}, {"config": _recorded(config)})
    if different := [str(difference) for difference in differences if difference.severity == "refuse"]:
        raise ConfigError(
            f"stream.replay = {str(folder)!r} records a different run: {'; '.join(different)}. Use its own run file: "
            f"rlhf replay {shlex.quote(str(folder))}"
        )
    if old_config.run.seed != config.run.seed:
        raise ConfigError(
            f"stream.replay = {str(folder)!r} was recorded with seed {old_config.run.seed}, but run.seed = "
            f"{config.run.seed}. Remove it."
        )
    last = min(config.run.stop_after or prepared.total_steps, prepared.total_steps)
    missing = next((step for step in range(1, last + 1) if not RunDirectory.rollouts_of(folder, step).is_file()), None)
    if missing is not None:
        reason = "" if old_config.checkpoint.save_rollouts else " It was run with checkpoint.save_rollouts = false."
        fewer = f" Set --steps {missing - 1} to replay the recorded steps." if missing > 1 else ""
        raise ConfigError(
            f"stream.replay = {str(folder)!r} records no samples of step {missing} of {last}.{reason}{fewer}"
        )


def _recorded(run: RunFile) -> dict[str, Any]:
    """The :data:`SECTIONS` of a run file."""
    sections = {name: section for name, section in run.model_dump(mode="json").items() if name in SECTIONS}
    return sections | {"stream": {**sections["stream"], "replay": None}}


def _layout(prepared: Prepared) -> list[str]:
    """Patterns of the options that may change on resume according to the run's plugins (``Component.layout``)."""
    sections = {name: part.resolved for name, part in prepared.parts.items()}
    sections |= {f"reward.{number}": reward.resolved for number, reward in enumerate(prepared.rewards)}
    return [pattern for name, plugin in sections.items() for pattern in layout_of(name, plugin.cls.layout)]


def checkpoint_metadata(prepared: Prepared, threads: int | None, device: str) -> dict[str, Any]:
    """The metadata of every checkpoint, as :func:`describe` makes it. A resume compares it, to make sure that it
    continues the same run."""
    return describe(
        prepared.config.model_dump(mode="json"),
        [plugin.manifest() for plugin in prepared.plugins],
        threads=threads,
        device=device,
        content=content(prepared),
    )


def content(prepared: Prepared) -> dict[str, str]:
    """Hashes of local files that the run reads and a checkpoint does not contain: the initial models of roles, the chat
    template, the rows."""
    digests = content_of_models(prepared.specs)
    if prepared.config.data.chat_template is not None:
        template: str = prepared.data.template.tokenizer.chat_template
        digests["data.chat_template"] = hashlib.sha256(template.encode()).hexdigest()
    for form, sources in prepared.data.fingerprints().items():
        digests |= {f"data.{form}.{name}": facts["fingerprint"] for name, facts in sources.items()}
    return digests


def content_of_models(specs: Mapping[str, ModelSpec]) -> dict[str, str]:
    """Hashes of the models of roles that are local folders, and of the models that adapters among them belong to."""
    folders = {name: Path(spec.path).expanduser() for name, spec in specs.items()}
    hashes = {folder: content_of(folder) for folder in {*folders.values()} if folder.is_dir()}
    digests = {f"{name}.model": hashes[folder] for name, folder in folders.items() if folder in hashes}
    for name, spec in specs.items():
        adapter = adapter_of(spec.path)
        if adapter is not None and (base := Path(adapter.base).expanduser()).is_dir():
            digests[f"{name}.base"] = content_of(base)
    return digests


def record_start(run: Run, prepared: Prepared) -> None:
    """Write the resolved run file and the manifest, and show the start-up warnings."""
    config, data = run.config, run.data
    with run.store.writing(run.directory.path):
        asked_once = config.run.model_copy(update={"overwrite": False})
        # Written first, because it marks the folder as a run. A run that is killed before the next line can start
        # again.
        run.directory.write_manifest(
            config.run.seed,
            [plugin.manifest() for plugin in prepared.plugins],
            run.first_step,
            total_steps=run.total_steps,
            options=prepared.selections.user_options(),
            data=data.fingerprints(),
            images=data.has_images,
            content=content(prepared),
            **_measured(prepared),
        )
        run.directory.write_config(to_toml(config.model_copy(update={"run": asked_once})))
    for count, reason in ((data.eval_dropped, "over the limits"), (data.eval_bad_rows, "bad")):
        if count:
            run.progress.note(f"{count} evaluation rows are {reason} and left out")
    if precision := run.roles["policy"].facts.precision:
        run.progress.note(f"precision: {precision}")
    for note in dict.fromkeys(note for role in run.roles.values() for note in role.facts.notes):
        run.progress.note(note)


def _measured(prepared: Prepared) -> dict[str, Any]:
    """Measured and looked-up values. A resume reads them instead of determining them again."""
    measurement = prepared.specs["policy"].on_processor
    measured: dict[str, Any] = {"on_processor": dataclasses.asdict(measurement)} if measurement else {}
    chat = prepared.data.template.chat
    if chat is not None and chat.day is not None:
        measured["template_day"] = chat.day.isoformat()
    return measured | ({"hub": commits} if (commits := prepared.commits.record()) else {})
