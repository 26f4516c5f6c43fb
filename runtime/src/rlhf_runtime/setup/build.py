"""From a checked run to one that is ready to step: the run directory, the models, the generator, the rewards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from rlhf.errors import StandstillError
from rlhf.interfaces import Launcher, ModelSpec, Precision
from rlhf.plugins import Plugins
from rlhf.types import Row
from rlhf_hub import hub

from rlhf_runtime.checkpoint import CheckpointStore, compare, describe, require_same_run
from rlhf_runtime.config.load import to_toml
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.early_row_check import RowCheck
from rlhf_runtime.loop.checkpoint_state import read_state
from rlhf_runtime.loop.control import TrainerOptions
from rlhf_runtime.loop.ema_evaluation import check_wearing, worn
from rlhf_runtime.loop.evaluate import check_metric, evaluate_loss, evaluate_rollouts
from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.loop.offline import offline
from rlhf_runtime.loop.online import online
from rlhf_runtime.loop.run import Run
from rlhf_runtime.models.precompute import BATCHES, precompute
from rlhf_runtime.models.roles import Role
from rlhf_runtime.observe.best_value import BestTracker
from rlhf_runtime.observe.numbered_folders import link_latest
from rlhf_runtime.observe.progress import Progress
from rlhf_runtime.observe.run_directory import RunDirectory
from rlhf_runtime.samples.answering import Answering, answering, evaluation_settings, training_settings
from rlhf_runtime.samples.rollouts import Rollouts
from rlhf_runtime.samples.stream import Stream
from rlhf_runtime.setup.added_options import allow_defaults
from rlhf_runtime.setup.launch import launch_roles
from rlhf_runtime.setup.plugins import section_of, where_trainer
from rlhf_runtime.setup.prepare import Prepared, is_scored, on_processor, prepare
from rlhf_runtime.setup.resume import check_observers, check_resume


def train(config: RunFile, plugins: Plugins | None = None) -> Run:
    """Run a run file from its first step (or its newest checkpoint) to its end. Returns the closed run."""
    prepared = prepare(config, plugins or Plugins.discover())
    run = build(prepared)
    try:
        (online if prepared.online else offline)(run)
    except StandstillError as cause:  # a signal asked for the end, and a plugin was in the way of the step's
        run.progress.note(str(cause))
        run.rescue()
        run.status = "stopped"
    except Exception:
        run.rescue()
        raise
    finally:
        run.close()
    return run


def build(prepared: Prepared) -> Run:
    """Claim the run directory, load the models, restore the newest checkpoint where the run resumes."""
    if prepared.config.run.threads is not None:
        torch.set_num_threads(prepared.config.run.threads)
    run = prepared.config.run
    directory = RunDirectory.create(run.output, run.resume, run.overwrite)
    try:
        link_latest(directory.path)
        return _build(prepared, directory)
    except BaseException:
        directory.close()
        raise


def _build(prepared: Prepared, directory: RunDirectory) -> Run:
    launcher: Launcher = prepared.parts["launcher"].build()
    launcher.reports = directory.path
    opened: list[Callable[[], None]] = []
    try:
        return _assemble(prepared, directory, launcher, opened)
    except BaseException:  # a checkpoint of another config, say, which shows after everything was started
        with ExitStack() as closing:  # the last one in is called first; each is, whatever another raises
            for close in (launcher.shutdown, *reversed(opened)):
                closing.callback(close)
        raise


def _assemble(prepared: Prepared, directory: RunDirectory, launcher: Launcher, opened: list[Callable[[], None]]) -> Run:
    """``opened`` gets what must be called where the run comes to nothing."""
    config, data = prepared.config, prepared.data
    progress = Progress(prepared.total_steps)
    store = CheckpointStore(directory.path, config.checkpoint.keep, progress.note)
    for note in (*hub.notes(), *prepared.notes):
        progress.note(note)
    rows = data.eval_rows()[: config.eval.max_rows]
    for start in directory.starts()[-1:]:  # what dtype = "auto" meant is not measured again by a resume
        if found := start.get("on_processor"):
            prepared.specs = on_processor(prepared.specs, Precision(**found))
    check_resume(prepared)
    check_observers(prepared)
    checked = row_check(prepared)
    opened.append(checked.stop)
    checked.start()
    precomputed = functools.partial(_precomputed, prepared, directory, store, progress, checked)
    roles = launch_roles(prepared, launcher, precomputed)
    checked.wait()
    policy = roles["policy"].facts
    plugins = [p.manifest() for p in prepared.plugins]
    settings = config.model_dump(mode="json")
    run = Run(
        config=config,
        meta=describe(settings, plugins, threads=torch.get_num_threads(), device=policy.device),
        algorithm=prepared.algorithm,
        roles=roles,
        data=data,
        launcher=launcher,
        directory=directory,
        store=store,
        progress=progress,
        total_steps=prepared.total_steps,
        schedule=prepared.schedule,
        rewards={r.name: r.instance for r in prepared.rewards},
        observers=prepared.observers,
        trainers=_trainer_options(prepared, roles),
    )
    answers = None
    if prepared.rollout is not None:
        answers = answering(prepared, roles, launcher, progress.note)
        answers.rollouts.main.stop = run.stop
        run.weights, run.phases, run.closers = answers.sync, answers.phases, answers.closers
        opened += answers.closers
        if prepared.online:
            run.stream = _stream(prepared, answers.rollouts, progress.note)
            assert run.stream.settings.failures is not None
            run.failures.append(run.stream.settings.failures)
    if rows:
        run.evaluate = _evaluation(run, prepared, rows, answers)
        run.best = BestTracker(config.eval.metric, config.eval.mode, config.eval.patience)
    if config.run.resume:
        _restore(run, prepared)
    if run.weights is not None:
        run.sync(run.first_step)
    with run.writing(directory.path):
        asked_once = config.run.model_copy(update={"overwrite": False})
        directory.write_config(to_toml(config.model_copy(update={"run": asked_once})))
        told = {"total_steps": run.total_steps, "options": list(config.origins.options), "data": data.fingerprints()}
        directory.write_manifest(config.run.seed, plugins, run.first_step, **told, **_measured(prepared))
    for count, why in ((data.eval_dropped, "over the limits"), (data.eval_bad_rows, "bad")):
        if count:
            progress.note(f"{count} evaluation rows are {why} and left out")
    if policy.precision:
        progress.note(f"precision: {policy.precision}")
    for note in dict.fromkeys(note for role in roles.values() for note in role.facts.notes):
        progress.note(note)
    return run


def _trainer_options(prepared: Prepared, roles: Mapping[str, Role]) -> list[TrainerOptions]:
    """The options of each trained role's trainer that may change, named by the section that sets them."""
    found = []
    for name, role in roles.items():
        if role.spec.role.trained:
            selected = prepared.parts.get(f"trainer.{name}", prepared.parts["trainer"])
            own = section_of(prepared.config, name).trainer
            changeable = sorted(selected.resolved.cls.changeable)
            names = {o: f"{where_trainer(name) if o in own else 'trainer'}.{o}" for o in changeable}
            found.append(TrainerOptions(role, selected.resolved, selected.config, names))
    return found


def _precomputed(
    prepared: Prepared,
    directory: RunDirectory,
    store: CheckpointStore,
    progress: Progress,
    checked: RowCheck,
    spec: ModelSpec,
    load: Callable[[], Role],
) -> Role:
    """A role whose annotations of all rows are made before the first step, or were by the run that is resumed."""
    checked.wait()
    path = directory.path / "precomputed" / f"{spec.role.name}.safetensors"
    data, size = prepared.data, BATCHES * prepared.config.data.batch_size
    examples = functools.partial(data.every_example, size)
    return precompute(spec, path, prepared.algorithm, examples, load, progress.note, store.writing)


def row_check(prepared: Prepared) -> RowCheck:
    """Looks at the rows of the run's first steps; at none where it resumes, as its first start did."""
    config = prepared.config
    rows = 0 if config.run.resume else prepared.total_steps * config.data.batch_size
    return RowCheck(prepared.data, rows)


def _stream(prepared: Prepared, rollouts: Rollouts, note: Callable[[str], None]) -> Stream:
    """The training batches of an online run."""
    config, needs = prepared.config, prepared.algorithm.needs()
    return Stream(
        prepared.data,
        rollouts,
        training_settings(config, note, needs.given),
        batch_size=config.data.batch_size,
        total_steps=prepared.total_steps,
        staleness=config.stream.staleness,
        round=config.stream.round,
        filter=config.stream.filter,
        on_failed_sample=config.stream.on_failed_sample,
        group_min=needs.group_min,
        scored=needs.reward,
    )


def _evaluation(run: Run, prepared: Prepared, rows: list[Row], answers: Answering | None) -> Callable[[], Metrics]:
    """What an evaluation computes: the metrics of the policy's answers to ``rows``, and of an offline run its loss."""
    config, parts = prepared.config, list[Callable[[], Metrics]]()
    if answers is not None:
        settings = evaluation_settings(config, run.progress.note)
        assert settings.failures is not None
        run.failures.append(settings.failures)
        parts.append(lambda: evaluate_rollouts(answers.rollouts, rows, settings, config.eval)[0])
    if not prepared.online:
        examples = prepared.data.examples(rows)
        losses = functools.partial(evaluate_loss, prepared.algorithm, run.roles, examples)
        if not config.run.resume:
            sources = {row.source for row in rows} if answers is not None else ()
            check_metric(config.eval, sources, is_scored(prepared), losses)
        parts.append(losses)

    def evaluate() -> Metrics:
        return {name: value for part in parts for name, value in part().items()}

    trainer = prepared.parts.get("trainer.policy", prepared.parts["trainer"]).resolved.cls
    return functools.partial(worn, run, evaluate) if check_wearing(run, trainer, config.eval.weights) else evaluate


def _measured(prepared: Prepared) -> dict[str, Any]:
    """What a resume must not measure or look up again."""
    found = prepared.specs["policy"].on_processor
    measured = {"on_processor": dataclasses.asdict(found)} if found is not None else {}
    return measured | ({"hub": pins} if (pins := hub.pins()) else {})


def _restore(run: Run, prepared: Prepared) -> None:
    """Continue from the newest complete checkpoint, or from the start where none was saved before the run died."""
    run.store.clean()
    newest = run.store.newest()
    if newest is None:
        run.progress.note("no complete checkpoint to resume from: starting at step 0")
        with run.writing(run.directory.path):
            run.directory.cut(None)
        return
    found = compare(newest.meta, run.meta, prepared.parts["trainer"].resolved.cls.layout)
    for line in require_same_run(allow_defaults(found, run.config, prepared.resolve), newest.path):
        run.progress.note(line)
    checkpoint = run.store.open(newest.step)
    run.first_step = read_state(run, checkpoint)
    with run.writing(run.directory.path):
        run.directory.cut(run.first_step)
    if missing := run.directory.metrics.missing(run.first_step):
        run.progress.note(f"{run.directory.metrics.path} has no line of {missing}: it was cut or replaced")
    run.progress.note(f"resumed after step {run.first_step} from {checkpoint.path}")
