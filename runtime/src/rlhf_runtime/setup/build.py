"""Builds a prepared run: claims the run directory, loads the models, starts the generator and the rewards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import PluginError, StandstillError
from rlhf.interfaces import Launcher, ModelSpec, Trainer
from rlhf.plugins import Plugins
from rlhf.plugins.registration import first_cause
from rlhf.types import Row

from rlhf_runtime.checkpoint.sample_table import load_writer
from rlhf_runtime.checkpoint.saved_groups import write_lines
from rlhf_runtime.checkpoint.store import CheckpointStore
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import section_path
from rlhf_runtime.data.dataset import RowCheck
from rlhf_runtime.loop.best_value import BestTracker
from rlhf_runtime.loop.checkpoint_state import RunState
from rlhf_runtime.loop.control import Control, TrainerOptions
from rlhf_runtime.loop.evaluate import (
    Evaluation,
    check_metric,
    evaluate_loss,
    evaluate_rollouts,
    evaluates_average,
    with_average,
)
from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.loop.offline import offline
from rlhf_runtime.loop.online import online
from rlhf_runtime.loop.reports import Reports
from rlhf_runtime.loop.run import OnlineRun, Run
from rlhf_runtime.loop.saves import Saves
from rlhf_runtime.loop.signals import StopRequest
from rlhf_runtime.loop.throughput import Throughput
from rlhf_runtime.models.precompute import BATCHES, PrecomputedRole, precompute
from rlhf_runtime.models.roles import Role
from rlhf_runtime.observe.progress import Progress, Show, muted, phase
from rlhf_runtime.observe.timeline import NO_TIMELINE, Timeline, TimelineFile
from rlhf_runtime.output.folder_lock import BusyFolderError
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_runtime.output.run_folder import link_latest
from rlhf_runtime.report.page import try_report
from rlhf_runtime.samples.acceptance import Acceptance
from rlhf_runtime.samples.continuous_stream import ContinuousStream
from rlhf_runtime.samples.rollout_settings import RolloutSettings, evaluation_settings, training_settings
from rlhf_runtime.samples.rollouts import Sampler
from rlhf_runtime.samples.stream import RecordedStream, Stream, WaveStream
from rlhf_runtime.setup.launch import launch_roles, launch_sampler
from rlhf_runtime.setup.prepare import Prepared, is_scored, prepare, with_folder
from rlhf_runtime.setup.resume import (
    check_latest,
    check_start,
    checkpoint_metadata,
    record_start,
    restore,
)

Answers = Callable[[int], Metrics]
"""Evaluates the policy's answers after a number of finished steps."""


def train(config: RunFile, plugins: Plugins | None = None, show: Show = "all", locked: bool = False) -> Run:
    """Run a run file from its first step, or from its newest checkpoint, to its end. Returns the closed run.

    Args:
        show: which output the run writes.
        locked: whether the caller holds the lock of the run's folder.
    """
    plugins = plugins or Plugins.discover()
    try:
        with muted(show == "quiet"):
            return _train(config, plugins, show, locked)
    except SystemExit as end:  # raised by a plugin: it would end the command with any exit code and no message
        raise PluginError(f"the run was ended by {first_cause(end)}. A plugin must raise an error instead") from end


def _train(config: RunFile, plugins: Plugins, show: Show, locked: bool) -> Run:
    run = build(prepare(config, plugins), show, locked)
    try:
        _run_to_its_end(run)
    except Exception:
        if (page := _report(run)) is not None:
            run.progress.note(f"{page} shows the run")
        raise
    run.report = _report(run)
    return run


def _report(run: Run) -> Path | None:
    """Write the page that shows a closed run. Returns its path; None if the page is not requested or cannot be
    written."""
    return try_report(run.directory.path, run.progress.note) if run.config.run.report else None


def _run_to_its_end(run: Run) -> None:
    try:
        online(run) if isinstance(run, OnlineRun) else offline(run)
    except StandstillError as cause:  # a signal asked the run to stop, and a plugin kept the step from ending
        run.progress.note(str(cause))
        run.saves.rescue()
        run.status = "stopped"
    except (Exception, SystemExit):
        run.saves.rescue()
        raise
    finally:
        run.close()


def build(prepared: Prepared, show: Show = "all", locked: bool = False) -> Run:
    """Claim the run directory and load the models. A resumed run restores its newest checkpoint. An error releases
    everything that was started."""
    resources = ExitStack()
    try:
        run = _build(prepared, resources, show, locked)
        if run.sampler is not None:
            with phase("first sync of weights to the generator"):
                run.sync(run.first_step)
            run.sampler.weights.pause_seconds = 0.0  # of the steps
        record_start(run, prepared)
    except BaseException:  # for example a checkpoint of another config, which is detected after everything was started
        resources.close()
        raise
    return run


def _build(prepared: Prepared, resources: ExitStack, show: Show, locked: bool) -> Run:
    """Build the run. ``resources`` receives a callback that releases each part as soon as the part is started."""
    # The folder, and the checks that read it.
    check_latest(prepared)
    prepared, directory = _claim_folder(prepared, locked)
    resources.callback(directory.close)
    config, data, algorithm = prepared.config, prepared.data, prepared.algorithm
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    link_latest(directory.path)
    launcher: Launcher = prepared.parts["launcher"].build()
    resources.callback(launcher.shutdown)
    progress = Progress(prepared.total_steps, show=show)
    store = CheckpointStore(directory.path, config.checkpoint.keep, progress.note, directory.require_own)
    for note in (*prepared.commits.notes, *prepared.notes):
        progress.note(note)
    checkpoint = check_start(prepared)

    roles = _models(prepared, launcher, directory, store, progress, resources)
    # What samples and what evaluates.
    stop = StopRequest(show=progress.urge)
    timeline = _timeline(prepared, directory, progress)
    resources.callback(timeline.close)
    sampler: Sampler | None = None
    if prepared.rollout is not None:
        sampler = launch_sampler(prepared, roles, launcher, progress.note, resources, stop, timeline)
        if config.checkpoint.save_rollouts:
            load_writer()
    settings: list[RolloutSettings] = []
    stream: Stream | None = None
    if sampler is not None and prepared.online:
        settings.append(training_settings(config, algorithm.needs(), progress.note))
        stream = training_stream(prepared, sampler, settings[0], timeline, progress.count)
        resources.callback(stream.close)
    evaluation: Evaluation | None = None
    if rows := data.eval_rows(config.eval.max_rows):
        answers: Answers | None = None
        if sampler is not None:
            settings.append(evaluation_settings(config, progress.note))
            answers = functools.partial(_answers, prepared, rows, sampler, settings[-1], directory, store, progress)
        evaluation = make_evaluation(prepared, rows, roles, sampler, stream, answers)

    # What is saved and what is reported. Only then the checkpoint is read, into all of these objects.
    rewards = {r.name: r.instance for r in prepared.rewards}
    best = evaluation.best if evaluation is not None else None
    control = Control(stop, _trainer_options(prepared, roles), progress.note)
    state = RunState(algorithm, roles, data, stream, rewards, prepared.observers, best, control, prepared.rollout)
    measure = Throughput(roles, prepared.places, sampler, config.run.peak_tflops).of_step
    reports = Reports(config, directory, progress, prepared.observers, store, timeline, measure)
    meta = checkpoint_metadata(prepared, torch.get_num_threads(), roles["policy"].facts.device)
    take_devices_back = sampler.phases.begin_learning if sampler is not None else lambda: None
    saves = Saves(config, algorithm, state, store, meta, directory, reports, progress, take_devices_back)
    first_step = restore(prepared, state, store, directory, meta, progress.note, checkpoint) if config.run.resume else 0
    make: Callable[..., Run] = Run if stream is None else functools.partial(OnlineRun, stream=stream)
    return make(
        config=config,
        algorithm=algorithm,
        roles=roles,
        data=data,
        total_steps=prepared.total_steps,
        schedule=prepared.schedule,
        first_step=first_step,
        sampler=sampler,
        evaluation=evaluation,
        state=state,
        saves=saves,
        directory=directory,
        store=store,
        reports=reports,
        progress=progress,
        failures=[s.failures for s in settings if s.failures is not None],
        stop=stop,
        control=control,
        resources=resources,
    )


def _claim_folder(prepared: Prepared, locked: bool) -> tuple[Prepared, RunDirectory]:
    """Create and lock the run directory. If the user named none and another run has just taken the name, use the next
    name."""
    while True:
        run = prepared.config.run
        try:
            return prepared, RunDirectory.create(run.output, run.resume, run.overwrite, locked)
        except BusyFolderError:
            config = with_folder(prepared.config)
            if config is prepared.config or run.resume or run.overwrite:
                raise
            prepared = replace(prepared, config=config)


def _models(
    prepared: Prepared,
    launcher: Launcher,
    directory: RunDirectory,
    store: CheckpointStore,
    progress: Progress,
    resources: ExitStack,
) -> dict[str, Role]:
    """Load the models. Rows are checked in the background meanwhile."""
    checked = row_check(prepared)
    resources.callback(checked.stop)
    checked.start()

    def precomputed(spec: ModelSpec, load: Callable[[], Role]) -> Role:
        """A role whose annotations are computed for all rows before the first step, or read from the run that is
        resumed."""
        checked.wait()  # the check uses the tokenizer in its thread, and a tokenizer is not thread-safe
        path = directory.path / "precomputed" / f"{spec.role.name}.safetensors"
        data, size = prepared.data, BATCHES * prepared.config.data.batch_size
        examples = functools.partial(data.every_example, size)
        trainer = prepared.trainer(spec.role.name)
        irrelevant = trainer.resolved.cls.layout | trainer.resolved.cls.training_options
        options = trainer.config.model_dump(mode="json", exclude=set(irrelevant))
        return precompute(spec, path, prepared.algorithm, examples, load, progress.note, store.writing, options)

    roles = launch_roles(prepared, launcher, precomputed, directory.path)
    store.check_space(sum(role.facts.trained_parameters for role in roles.values()), prepared.config.most_checkpoints)
    for role in roles.values():
        if isinstance(role, PrecomputedRole):
            continue  # it has no model
        if isinstance(role.group.worker, Trainer):  # in this process: nothing is sent to show its progress
            role.group.worker.progress = functools.partial(progress.count, "micro-batches")
    with phase("checking rows"):
        left_out = checked.wait()
    if left_out:
        progress.note(left_out)
    return roles


def _answers(
    prepared: Prepared,
    rows: list[Row],
    sampler: Sampler,
    settings: RolloutSettings,
    directory: RunDirectory,
    store: CheckpointStore,
    progress: Progress,
    steps_done: int,
) -> Metrics:
    """Evaluate the policy's answers to ``rows`` after step ``steps_done``. Write them, as `rlhf eval --save` does."""
    count = functools.partial(progress.count, "samples")
    metrics, groups = evaluate_rollouts(sampler.rollouts, rows, settings, prepared.evaluation, count=count)
    if prepared.config.checkpoint.save_rollouts:
        with store.writing(path := directory.evaluations(steps_done)):
            write_lines(path, groups, prepared.data.template.prompt_of)
    return metrics


def _trainer_options(prepared: Prepared, roles: Mapping[str, Role]) -> list[TrainerOptions]:
    """The trainer options of each trained role that may change during the run, named by the section that sets them."""
    options = []
    for name, role in roles.items():
        if role.spec.role.trained:
            selected, role_options = prepared.trainer(name), prepared.section(name).trainer
            changeable = sorted(selected.resolved.cls.changeable)
            names = {o: f"{section_path(name) + '.' if o in role_options else ''}trainer.{o}" for o in changeable}
            options.append(TrainerOptions(role, selected.resolved, selected.config, names))
    return options


def row_check(prepared: Prepared) -> RowCheck:
    """Checks the rows of the run's first steps. A resumed run checks none, because its first start did."""
    config = prepared.config
    rows = prepared.total_steps * config.data.batch_size
    if prepared.data.curriculum is not None:  # the curriculum may choose any row
        rows = prepared.data.rows_per_epoch
    return RowCheck(prepared.data, 0 if config.run.resume else rows)


def _timeline(prepared: Prepared, directory: RunDirectory, progress: Progress) -> Timeline:
    """The timeline of this start of the run, if the run file asks for one."""
    steps = prepared.config.run.timeline
    if steps is None:
        return NO_TIMELINE
    try:
        return TimelineFile(directory.timeline, len(directory.starts()) + 1, steps, progress.note)
    except OSError as error:
        progress.note(f"there is no timeline of this start: {directory.timeline} cannot be written: {error}")
        return NO_TIMELINE


def make_evaluation(
    prepared: Prepared,
    rows: list[Row],
    roles: dict[str, Role],
    sampler: Sampler | None,
    stream: Stream | None,
    answers: Answers | None,
) -> Evaluation:
    """The evaluation of a run: the metrics of the policy's answers to ``rows`` and, in an offline run, the loss.

    Args:
        answers: evaluates the answers after a number of finished steps, if there is a sampler.
    """
    config, parts = prepared.config, [] if answers is None else [answers]
    if not prepared.online:
        examples = prepared.data.examples(rows)
        losses = functools.partial(evaluate_loss, prepared.algorithm, roles, examples)
        if not config.run.resume:
            sources = {row.source for row in rows} if answers is not None else ()
            check_metric(prepared.evaluation, sources, is_scored(prepared), losses)
        parts.append(lambda steps_done: losses())

    def compute(steps_done: int) -> Metrics:
        return {name: value for part in parts for name, value in part(steps_done).items()}

    best = BestTracker(config.eval.metric, config.eval.mode, config.eval.patience)
    policy, trainer = roles["policy"], prepared.trainer("policy").resolved.cls
    if not evaluates_average(policy, trainer, config.eval.weights):
        return Evaluation(compute, best)

    def compute_average(steps_done: int) -> Metrics:
        return with_average(functools.partial(compute, steps_done), policy, sampler, stream, prepared.total_steps)

    return Evaluation(compute_average, best)


def training_stream(
    prepared: Prepared,
    sampler: Sampler,
    settings: RolloutSettings,
    timeline: Timeline,
    count: Callable[[str, int, int], None],
) -> Stream:
    """The stream that ``[stream]`` asks for.

    Args:
        count: shows how many (samples, or groups) are ready while a step waits for them.
    """
    config, section, needs = prepared.config, prepared.config.stream, prepared.algorithm.needs()
    if section.replay is not None:
        recorded = functools.partial(RunDirectory.rollouts_of, Path(section.replay))
        return RecordedStream(recorded, prepared.data.row, section.staleness + section.round - 1)
    common: dict[str, Any] = {
        "batch_size": config.data.batch_size,
        "total_steps": prepared.total_steps,
        "staleness": section.staleness,
        "acceptance": Acceptance(section.filter, section.on_failed_sample, needs.group_min, needs.reward, timeline),
    }
    if section.mode == "waves":
        common["count"] = functools.partial(count, "samples")
        return WaveStream(prepared.data, sampler.rollouts, settings, round=section.round, **common)
    common["count"] = functools.partial(count, "groups")
    return ContinuousStream(
        prepared.data, sampler.rollouts, settings, order=section.order, oversample=section.oversample, **common
    )
