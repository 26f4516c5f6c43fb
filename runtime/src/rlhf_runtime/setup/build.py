"""Builds a prepared run: claims the run directory, loads the models, starts the generator and the rewards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from rlhf.errors import PluginError, StandstillError
from rlhf.interfaces import Launcher, ModelSpec, Trainer
from rlhf.plugins import Plugins
from rlhf.plugins.registration import first_cause
from rlhf.types import Group

from rlhf_runtime.checkpoint import CheckpointStore
from rlhf_runtime.checkpoint.sample_table import load_writer
from rlhf_runtime.checkpoint.saved_groups import write_lines
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.early_row_check import RowCheck
from rlhf_runtime.loop.checkpoint_state import RunState
from rlhf_runtime.loop.control import Control, TrainerOptions
from rlhf_runtime.loop.evaluate import Evaluation
from rlhf_runtime.loop.offline import offline
from rlhf_runtime.loop.online import online
from rlhf_runtime.loop.reports import Reports
from rlhf_runtime.loop.run import OnlineRun, Run
from rlhf_runtime.loop.saves import Saves
from rlhf_runtime.models.precompute import BATCHES, PrecomputedRole, precompute
from rlhf_runtime.models.roles import Role
from rlhf_runtime.observe.numbered_folders import link_latest
from rlhf_runtime.observe.phases import phase
from rlhf_runtime.observe.progress import Progress
from rlhf_runtime.observe.run_directory import RunDirectory
from rlhf_runtime.observe.signals import StopRequest
from rlhf_runtime.observe.timeline import NO_TIMELINE, Timeline
from rlhf_runtime.observe.timeline_file import TimelineFile
from rlhf_runtime.samples.failures import Failures
from rlhf_runtime.samples.sampling import Sampler, evaluation_failures, training_failures
from rlhf_runtime.samples.stream import Stream
from rlhf_runtime.setup.evaluation import make_evaluation
from rlhf_runtime.setup.join import join
from rlhf_runtime.setup.launch import launch_roles, launch_sampler
from rlhf_runtime.setup.plugins import where_trainer
from rlhf_runtime.setup.prepare import Prepared, prepare
from rlhf_runtime.setup.recorded_run import check_record
from rlhf_runtime.setup.resume import check_latest, check_observers, check_resume, restore
from rlhf_runtime.setup.start_record import checkpoint_metadata, record_start
from rlhf_runtime.setup.training_stream import training_stream


def train(config: RunFile, plugins: Plugins | None = None) -> Run:
    """Run a run file from its first step, or from its newest checkpoint, to its end. Returns the closed run."""
    plugins = plugins or Plugins.discover()
    join(config, plugins)
    try:
        return _train(config, plugins)
    except SystemExit as end:  # of a plugin: it would end the command with any exit code, and without a word
        raise PluginError(f"the run was ended by {first_cause(end)}. A plugin must raise an error instead") from end


def _train(config: RunFile, plugins: Plugins) -> Run:
    run = build(prepare(config, plugins))
    try:
        online(run) if isinstance(run, OnlineRun) else offline(run)
    except StandstillError as cause:  # a signal asked the run to stop, and a plugin kept the step from ending
        run.progress.note(str(cause))
        run.rescue()
        run.status = "stopped"
    except (Exception, SystemExit):
        run.rescue()
        raise
    finally:
        run.close()
    return run


def build(prepared: Prepared) -> Run:
    """Claim the run directory, load the models and, where the run resumes, restore the newest checkpoint. An error
    releases everything that was started."""
    resources = ExitStack()
    try:
        run = _build(prepared, resources)
        if run.sampler is not None:
            with phase("first sync of weights to the generator"):
                run.sync(run.first_step)
        record_start(run, prepared)
    except BaseException:  # for example a checkpoint of another config, which is found after everything was started
        resources.close()
        raise
    return run


def _build(prepared: Prepared, resources: ExitStack) -> Run:
    """Build the run. ``resources`` receives a callback that releases each part as soon as the part is started."""
    config, data, algorithm = prepared.config, prepared.data, prepared.algorithm
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_latest(prepared)
    directory = RunDirectory.create(config.run.output, config.run.resume, config.run.overwrite)
    resources.callback(directory.close)
    link_latest(directory.path)
    launcher: Launcher = prepared.parts["launcher"].build()
    resources.callback(launcher.shutdown)
    progress = Progress(prepared.total_steps)
    store = CheckpointStore(directory.path, config.checkpoint.keep, progress.note)
    for note in (*prepared.commits.notes, *prepared.notes):
        progress.note(note)
    checkpoint = check_resume(prepared)
    check_record(prepared)
    check_observers(prepared)

    checked = row_check(prepared)
    resources.callback(checked.stop)
    checked.start()
    precomputed = functools.partial(_precomputed, prepared, directory, store, progress, checked)
    roles = launch_roles(prepared, launcher, precomputed, directory.path)
    for role in roles.values():
        if isinstance(role, PrecomputedRole):
            continue  # it has no model
        if isinstance(role.group.worker, Trainer):  # in this process: nothing is sent to show its progress
            role.group.worker.progress = functools.partial(progress.count, "micro-batches")
    with phase("checking rows"):
        checked.wait()
    stop = StopRequest()
    timeline = _timeline(prepared, directory, progress)
    resources.callback(timeline.close)
    sampler: Sampler | None = None
    if prepared.rollout is not None:
        sampler = launch_sampler(prepared, prepared.rollout, roles, launcher, progress.note, resources, stop, timeline)
        if config.checkpoint.save_rollouts:
            load_writer()
    failures: list[Failures] = []
    stream: Stream | None = None
    if sampler is not None and prepared.online:
        failures.append(training_failures(config, progress.note))
        stream = training_stream(prepared, sampler, failures[0], timeline, progress.count)
        resources.callback(stream.close)
    evaluation: Evaluation | None = None
    if rows := data.eval_rows(config.eval.max_rows):
        if sampler is not None:
            failures.append(evaluation_failures(config, progress.note))
        evaluation = make_evaluation(
            prepared,
            rows,
            roles,
            sampler,
            stream,
            failures[-1:],
            functools.partial(_save_answers, prepared, directory, store),
            functools.partial(progress.count, "samples"),
        )

    rewards = {r.name: r.instance for r in prepared.rewards}
    best = evaluation.best if evaluation is not None else None
    control = Control(stop, _trainer_options(prepared, roles), progress.note)
    snapshots = prepared.schedule.snapshots
    state = RunState(
        algorithm,
        roles,
        snapshots,
        data,
        stream,
        rewards,
        prepared.observers,
        best,
        control,
        prepared.curriculum,
    )
    reports = Reports(directory, progress, prepared.observers, store, timeline)
    meta = checkpoint_metadata(prepared, roles["policy"])
    saves = Saves(
        config,
        algorithm,
        state,
        store,
        meta,
        directory,
        reports,
        progress,
        sampler.phases.begin_learning if sampler is not None else lambda: None,
    )
    parts: dict[str, Any] = {
        "config": config,
        "algorithm": algorithm,
        "roles": roles,
        "data": data,
        "total_steps": prepared.total_steps,
        "schedule": prepared.schedule,
        "first_step": (
            restore(prepared, state, store, directory, meta, progress.note, checkpoint) if config.run.resume else 0
        ),
        "sampler": sampler,
        "evaluation": evaluation,
        "state": state,
        "saves": saves,
        "directory": directory,
        "store": store,
        "reports": reports,
        "progress": progress,
        "failures": failures,
        "stop": stop,
        "control": control,
        "resources": resources,
    }
    return OnlineRun(**parts, stream=stream) if stream is not None else Run(**parts)


def _save_answers(
    prepared: Prepared, directory: RunDirectory, store: CheckpointStore, steps_done: int, groups: list[Group]
) -> None:
    """Write the answers of the evaluation after step ``steps_done``, as `rlhf eval --save` does."""
    if prepared.config.checkpoint.save_rollouts:
        with store.writing(path := directory.evaluations(steps_done)):
            write_lines(path, groups, prepared.data.template.prompt_of)


def _trainer_options(prepared: Prepared, roles: Mapping[str, Role]) -> list[TrainerOptions]:
    """The trainer options of each trained role that may change during the run, named by the section that sets them."""
    options = []
    for name, role in roles.items():
        if role.spec.role.trained:
            selected, own = prepared.trainer(name), prepared.section(name).trainer
            changeable = sorted(selected.resolved.cls.changeable)
            names = {o: f"{where_trainer(name) if o in own else 'trainer'}.{o}" for o in changeable}
            options.append(TrainerOptions(role, selected.resolved, selected.config, names))
    return options


def _precomputed(
    prepared: Prepared,
    directory: RunDirectory,
    store: CheckpointStore,
    progress: Progress,
    checked: RowCheck,
    spec: ModelSpec,
    load: Callable[[], Role],
) -> Role:
    """A role whose annotations of all rows are computed before the first step, or read from the run that is resumed."""
    checked.wait()
    path = directory.path / "precomputed" / f"{spec.role.name}.safetensors"
    data, size = prepared.data, BATCHES * prepared.config.data.batch_size
    examples = functools.partial(data.every_example, size)
    return precompute(spec, path, prepared.algorithm, examples, load, progress.note, store.writing)


def row_check(prepared: Prepared) -> RowCheck:
    """Checks the rows of the run's first steps. A resumed run checks none, because its first start did."""
    config = prepared.config
    rows = prepared.total_steps * config.data.batch_size
    if prepared.curriculum is not None:  # the curriculum may choose any row
        rows = prepared.data.rows_per_epoch
    return RowCheck(prepared.data, 0 if config.run.resume else rows)


def _timeline(prepared: Prepared, directory: RunDirectory, progress: Progress) -> Timeline:
    """The timeline of this start of the run, if the run file asks for one."""
    steps = prepared.config.run.timeline
    if steps is None:
        return NO_TIMELINE
    return TimelineFile(directory.timeline, len(directory.starts()) + 1, steps, progress.note)
