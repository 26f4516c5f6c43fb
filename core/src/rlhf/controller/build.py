"""From a checked run to one that is ready to step: the run directory, the models, the generator, the rewards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from rlhf import hub
from rlhf.checkpoint import CheckpointStore, compare, describe, require_same_run
from rlhf.config import to_toml
from rlhf.controller.answering import answering, evaluation_settings, training_settings
from rlhf.controller.evaluate import evaluate_loss, evaluate_rollouts
from rlhf.controller.learn import Metrics
from rlhf.controller.lending import lend
from rlhf.controller.offline import offline
from rlhf.controller.online import online
from rlhf.controller.parts import base_of, section_of
from rlhf.controller.precompute import precompute
from rlhf.controller.prepare import Prepared, on_processor, prepare
from rlhf.controller.roles import Role
from rlhf.controller.run import Run
from rlhf.controller.state import read_state
from rlhf.controller.stream import Stream
from rlhf.controller.wearing import check_wearing, worn
from rlhf.errors import ConfigError, StandstillError
from rlhf.interfaces import Launcher, ModelSpec
from rlhf.modeling.precision import Precision
from rlhf.observe.best import BestTracker
from rlhf.observe.progress import Progress
from rlhf.observe.rundir import RunDirectory
from rlhf.plugins import Plugins
from rlhf.runfile import RunFile


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
    directory = RunDirectory.create(prepared.config.run.output, prepared.config.run.resume)
    try:
        return _build(prepared, directory)
    except BaseException:
        directory.close()
        raise


def launch_roles(
    prepared: Prepared,
    launcher: Launcher,
    precomputed: Callable[[ModelSpec, Callable[[], Role]], Role] | None = None,
) -> dict[str, Role]:
    """Load every role's model where the launcher puts it.

    Args:
        precomputed: (spec, what loads its model) -> the role, for those of which the run file asks it. They come first,
            so that their models are gone when others are loaded.
    """
    config = prepared.config
    found: dict[str, Role] = {}
    launcher.place(prepared.places, prepared.plugins)
    if "generator" in prepared.parts:
        launcher.choose_link(prepared.parts["generator"].resolved.cls, config.sync.transport)
    for name in sorted(prepared.specs, key=lambda name: not section_of(config, name).precompute):
        load = functools.partial(_launch_role, name, prepared, launcher)
        if section_of(config, name).precompute and precomputed is not None:
            found[name] = precomputed(prepared.specs[name], load)
        else:
            found[name] = _base_of(name, prepared, found) or load()
    roles = {name: found[name] for name in prepared.specs}
    lend(prepared.algorithm.needs().lent, roles)
    return roles


def _launch_role(name: str, prepared: Prepared, launcher: Launcher) -> Role:
    trainer, spec = prepared.parts.get(f"trainer.{name}", prepared.parts["trainer"]), prepared.specs[name]
    group = launcher.launch_trainer(trainer.resolved.cls, trainer.config, spec)
    usual: int = group.call("token_budget", [()] * group.size)[0]
    return Role(spec, group, section_of(prepared.config, name).micro_tokens or usual)


def _base_of(name: str, prepared: Prepared, roles: Mapping[str, Role]) -> Role | None:
    """A frozen role that starts as another role's model is that model without its adapters, where it trains some."""
    declared = {each: spec.role for each, spec in prepared.specs.items()}
    source = roles.get(base_of(prepared.config, declared, prepared.places, name) or "")
    if source is None or name in prepared.snapshots or "base" not in source.facts.views:
        return None
    return Role(prepared.specs[name], source.group, source.budget, view="base")


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
    config, algorithm, data = prepared.config, prepared.algorithm, prepared.data
    progress = Progress(prepared.total_steps)
    store = CheckpointStore(directory.path, config.checkpoint.keep, progress.note)
    for note in (*hub.notes(), *prepared.notes):
        progress.note(note)

    def remember(spec: ModelSpec, load: Callable[[], Role]) -> Role:
        path = directory.path / "precomputed" / f"{spec.role.name}.safetensors"
        size = 8 * config.data.batch_size
        return precompute(spec, path, algorithm, lambda: data.every_example(size), load, progress.note, store.writing)

    rows = data.eval_rows()[: config.eval.max_rows]
    least = algorithm.needs().rows_min
    if rows and not prepared.online and len(rows) < least:
        raise ConfigError(
            f"{algorithm.name} needs at least {least} rows to evaluate on, got {len(rows)} from data.eval. Add rows, "
            "or leave data.eval out."
        )
    for start in directory.starts()[-1:]:
        if found := start.get("on_processor"):
            prepared.specs = on_processor(prepared.specs, Precision(**found))
    roles = launch_roles(prepared, launcher, remember)
    policy = roles["policy"].facts
    plugins = [p.manifest() for p in prepared.plugins]
    run = Run(
        config=config,
        meta=describe(
            config.model_dump(mode="json"),
            plugins,
            threads=torch.get_num_threads(),
            device=policy.device,
            layout=prepared.parts["trainer"].resolved.cls.layout,
        ),
        algorithm=algorithm,
        roles=roles,
        data=data,
        launcher=launcher,
        directory=directory,
        store=store,
        progress=progress,
        total_steps=prepared.total_steps,
        snapshots=prepared.snapshots,
        rewards={r.name: r.instance for r in prepared.rewards},
        observers=prepared.observers,
    )
    evaluations: list[Callable[[], Metrics]] = []
    if prepared.rollout is not None:
        answers = answering(prepared, roles, launcher, progress.note)
        answers.rollouts.main.stop = run.stop
        run.weights, run.phases, run.closers = answers.sync, answers.phases, answers.closers
        opened += answers.closers
        settings = evaluation_settings(config)
        evaluations.append(lambda: evaluate_rollouts(answers.rollouts, rows, settings, config.eval)[0])
        if prepared.online:
            run.stream = Stream(
                data,
                answers.rollouts,
                training_settings(config, algorithm.needs().given),
                batch_size=config.data.batch_size,
                total_steps=prepared.total_steps,
                staleness=config.stream.staleness,
                round=config.stream.round,
                filter=config.stream.filter,
                on_failed_sample=config.stream.on_failed_sample,
                group_min=algorithm.needs().group_min,
                scored=algorithm.needs().reward,
            )
    if rows and not prepared.online:
        examples = data.examples(rows)
        evaluations.append(lambda: evaluate_loss(algorithm, roles, examples))
    if rows:
        run.evaluate = lambda: {name: value for evaluate in evaluations for name, value in evaluate().items()}
        trainer = prepared.parts.get("trainer.policy", prepared.parts["trainer"]).resolved.cls
        if check_wearing(run, trainer, config.eval.weights):
            run.evaluate = functools.partial(worn, run, run.evaluate)
        run.best = BestTracker(config.eval.metric, config.eval.mode, config.eval.patience)
    if config.run.resume:
        _restore(run)
    if run.weights is not None:
        run.sync(run.first_step)
    with run.writing(directory.path):
        directory.write_config(to_toml(config))
        directory.write_manifest(config.run.seed, plugins, run.first_step, **_measured(prepared))
    for count, why in ((data.eval_dropped, "over the limits"), (data.eval_bad_rows, "bad")):
        if count:
            progress.note(f"{count} evaluation rows are {why} and left out")
    if policy.precision:
        progress.note(f"precision: {policy.precision}")
    return run


def _measured(prepared: Prepared) -> dict[str, Any]:
    """What a resume must not measure or look up again."""
    found = prepared.specs["policy"].on_processor
    measured = {"on_processor": dataclasses.asdict(found)} if found is not None else {}
    return measured | ({"hub": pins} if (pins := hub.pins()) else {})


def _restore(run: Run) -> None:
    """Continue from the newest complete checkpoint, or from the start where none was saved before the run died."""
    run.store.clean()
    newest = run.store.newest()
    if newest is None:
        run.progress.note("no complete checkpoint to resume from: starting at step 0")
        with run.writing(run.directory.path):
            run.directory.cut(None)
        return
    for line in require_same_run(compare(newest.meta, run.meta), newest.path):
        run.progress.note(line)
    checkpoint = run.store.open(newest.step)
    run.first_step = read_state(run, checkpoint.path)
    with run.writing(run.directory.path):
        run.directory.cut(run.first_step)
    run.progress.note(f"resumed after step {run.first_step} from {checkpoint.path}")
