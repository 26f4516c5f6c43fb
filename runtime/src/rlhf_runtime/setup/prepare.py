"""All checks of a run that need no loaded model: plugins, options, needs, data, schedule.

``--dry-run`` stops after this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rlhf.errors import ConfigError, PluginError, boundary
from rlhf.interfaces import GENERATOR, ModelSpec, Observer, Place, Precision, Trainer
from rlhf.plugins import Plugins
from rlhf_hub.hub import Commits

from rlhf_runtime.checks.order import checked
from rlhf_runtime.checks.parts import (
    check_columns,
    check_eval_rows,
    check_margins,
    check_parts,
    check_roles,
    check_texts,
    idle_engine_notes,
    stream_notes,
    tool_notes,
)
from rlhf_runtime.checks.run import RunPlugins, device_here
from rlhf_runtime.config.components import Selections
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import MAX_STEPS
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.image_tokens import ImageTokens, check_image_tokens, image_tokens
from rlhf_runtime.data.tokenizer import check_ids, check_stops, check_vocabularies, load_tokenizer, tokens_of
from rlhf_runtime.loop.evaluate import check_metric
from rlhf_runtime.loop.schedule import UpdateSchedule
from rlhf_runtime.observe.progress import phase
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_runtime.output.run_folder import default_folder
from rlhf_runtime.samples.episodes import Episodes


@dataclass(frozen=True)
class PlacedPlugins(RunPlugins):
    """Checked plugins with the models that they need and their placement. This is enough to load the models and start
    the rewards."""

    tokenizer: Any
    specs: Mapping[str, ModelSpec]
    """{role: what the trainer loads for it}"""
    places: Mapping[str, Place]
    """The placement of every role, and of the generator if there is one."""


@dataclass(frozen=True)
class Prepared(PlacedPlugins):
    """A checked run, with everything that can be determined before a model is loaded."""

    data: TrainData
    total_steps: int
    schedule: UpdateSchedule
    episodes: Episodes | None
    """None if the run has no environment."""
    observers: Mapping[str, Observer]
    resolve: Callable[[RunFile], RunFile]
    """Fills in the plugins' options of a changed run file."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The start-up warnings."""
        idle = idle_engine_notes(self.config, self.parts["launcher"].resolved.cls, self.generator_class)
        unread = [] if self.rollout is None else tool_notes(self.rollout, self.data)
        return (*self.data.notes, *unread, *stream_notes(self.config, self.algorithm), *idle)


def prepare(config: RunFile, plugins: Plugins) -> Prepared:
    """Resolve and check a run.

    Raises ConfigError, PluginError, DataError or ModelError saying what to change.
    """
    config = with_folder(config)
    return prepare_run(checked(config, plugins, commits=Commits(last_start(config).get("hub"))), plugins)


def last_start(config: RunFile) -> dict[str, Any]:
    """What the last start of the run recorded; empty if the run does not resume."""
    return RunDirectory.last_start(config.run.output) if config.run.resume else {}


def prepare_run(plugins_of_run: RunPlugins, plugins: Plugins) -> Prepared:
    """Read the data of checked plugins, find the places of their roles, and check all of it.

    Raises ConfigError, PluginError, DataError or ModelError saying what to change.
    """
    config, algorithm, parts = plugins_of_run.config, plugins_of_run.algorithm, plugins_of_run.parts
    rollout, previous_start = plugins_of_run.rollout, last_start(config)
    tokenizer, images = _tokenizer(plugins_of_run), _images(plugins_of_run)
    data = _read_data(plugins_of_run, tokenizer, images, previous_start.get("template_day"))
    steps = total_steps(config, data.rows_per_epoch)
    if "curriculum" in parts:
        data.choose_by(parts["curriculum"].build(), steps)
    schedule = UpdateSchedule.of(algorithm, steps)
    check_roles(plugins_of_run, schedule)
    placed_plugins = place(plugins_of_run, tokenizer, schedule, data.has_images, previous_start.get("on_processor"))
    specs = placed_plugins.specs
    check_vocabularies(specs["policy"], tokenizer, specs.values())
    if data.has_images and isinstance(images, ImageTokens):
        check_image_tokens(images, [specs[role.name] for role in algorithm.needs().roles])
    if rollout is not None:
        with boundary(PluginError, f"check() of rollout {config.rollout.use!r}"):
            rollout.check()
    episodes: Episodes | None = None
    if "env" in parts and config.env is not None:
        episodes = Episodes(parts["env"].resolved, parts["env"].config, config.env)
    _check_rows(plugins_of_run, data, learns=bool(schedule.total()))
    selections = plugins_of_run.selections
    observers = {
        choice.label: selections[path]
        for number, choice in enumerate(config.observer)
        if (path := f"observer.{number}") in selections
    }
    return Prepared(
        **vars(placed_plugins),
        data=data,
        total_steps=steps,
        schedule=schedule,
        episodes=episodes,
        observers={name: selection.build() for name, selection in observers.items()},
        resolve=lambda config: Selections.of(plugins, config).config,
    )


def _tokenizer(plugins_of_run: RunPlugins) -> Any:
    """The policy's tokenizer. It is checked to support the ids, the stop texts and the texts of rewards that the run
    uses."""
    config, rollout = plugins_of_run.config, plugins_of_run.rollout
    model, trusted = plugins_of_run.model("policy"), config.policy.trust_remote_code
    tokenizer = load_tokenizer(model, trusted)
    check_ids(model, trusted)
    check_stops(config.sampling.stop, tokenizer)
    if rollout is not None and rollout.needs_generator:
        check_texts(plugins_of_run.rewards, tokenizer)
    return tokenizer


def _read_data(
    plugins_of_run: RunPlugins, tokenizer: Any, images: ImageTokens | str, template_day: str | None
) -> TrainData:
    """The rows of the run, with a chat template that supports what its rollout needs.

    Args:
        template_day: the time that chat templates read: the time of the run's first start. None on the first start.
    """
    config, algorithm, rollout = plugins_of_run.config, plugins_of_run.algorithm, plugins_of_run.rollout
    answers, day = algorithm.needs().answered, datetime.fromisoformat(template_day) if template_day else None
    with phase("reading data"):
        data = TrainData(
            config.data, tokenizer, algorithm.data, config.run.seed, answers, plugins_of_run.commits, images, day
        )
    algorithm.use_tokens(replace(tokens_of(tokenizer), opening=data.template.opening_ids))
    if config.data.margin is not None and plugins_of_run.trains:
        check_margins(algorithm, data)
    if rollout is not None:
        if rollout.needs_env:
            data.template.observations.check()
        if rollout.needs_messages:
            _ = data.template.messages  # raises if there is no chat template
            data.template.shows_tools = False
        if rollout.needs_tools:
            data.template.messages.answers.check_tools()
        # An environment, or a program that uses the chat API, may show the policy content that the rows do not have.
        data.template.require_text = not (rollout.needs_env or rollout.needs_messages)
    return data


def place(
    plugins_of_run: RunPlugins,
    tokenizer: Any,
    schedule: UpdateSchedule,
    has_images: bool = False,
    on_processor: Mapping[str, Any] | None = None,
) -> PlacedPlugins:
    """Determine and check what the trainer loads for each role, and on which devices.

    Args:
        on_processor: the precision of a CPU that the run's last start measured.
    """
    updates, places = schedule.total(), plugins_of_run.places_on(device_here())
    specs = {
        name: plugins_of_run.spec(name, updates[name], places[name].ranks, has_images) for name in plugins_of_run.roles
    }
    specs = {name: replace(spec, replaced=name in schedule.snapshots) for name, spec in specs.items()}
    specs = with_precision(specs, plugins_of_run.trainer_class, on_processor)
    check_parts(plugins_of_run, places, specs, is_local=True)
    return PlacedPlugins(**vars(plugins_of_run), tokenizer=tokenizer, specs=specs, places=places)


def _check_rows(plugins_of_run: RunPlugins, data: TrainData, learns: bool) -> None:
    """Check that training and held-out rows have the columns and answers that the run reads.

    Args:
        learns: whether the run updates weights. `rlhf eval` does not: it only answers held-out rows.
    """
    config, algorithm = plugins_of_run.config, plugins_of_run.algorithm
    with phase("tokenising held-out rows") if config.data.eval else nullcontext():
        held_out = data.eval_rows(config.eval.max_rows)  # read in any case, so that invalid rows are refused
    check_columns(plugins_of_run, data, held_out, plugins_of_run.online and learns and config.stream.replay is None)
    if algorithm.data != "prompts":
        check_eval_rows(algorithm, len(held_out))
    elif held_out and plugins_of_run.trains and not config.run.resume:  # the first start of a resumed run checked it
        check_metric(plugins_of_run.evaluation, {row.source for row in held_out}, is_scored(plugins_of_run), None)


def _images(plugins_of_run: RunPlugins) -> ImageTokens | str:
    """The tokens of images, or a text that says why the run cannot have images."""
    tokens = image_tokens(plugins_of_run.model("policy"), plugins_of_run.config.policy.trust_remote_code)
    if isinstance(tokens, str):
        return tokens
    for name in ("trainer", GENERATOR):
        cls = plugins_of_run.parts[name].resolved.cls if name in plugins_of_run.parts else None
        if cls is not None and "images" not in cls.capabilities:
            return f"{name} {cls.name!r} cannot use them (capability 'images')"
    return tokens


def with_folder(config: RunFile) -> RunFile:
    """The run file, with ``run.output`` filled in if the user did not set it."""
    run = config.run
    if run.resume and run.overwrite:
        raise ConfigError("run.resume and run.overwrite: a run is either continued or deleted. Remove one of them.")
    if "run.output" in config.origins.options:
        return config
    output = str(default_folder(run.resume or run.overwrite))
    return config.model_copy(update={"run": run.model_copy(update={"output": output})})


def is_scored(plugins_of_run: RunPlugins) -> bool:
    """Whether answers can get a reward. Recorded samples may contain rewards."""
    rollout = plugins_of_run.rollout
    of_rollout = rollout is not None and (rollout.gives_rewards or not rollout.needs_generator)
    return plugins_of_run.has_rewards or plugins_of_run.config.env is not None or of_rollout


def with_precision(
    specs: Mapping[str, ModelSpec], trainer: type[Trainer], recorded: Mapping[str, Any] | None = None
) -> dict[str, ModelSpec]:
    """The same roles, with ``dtype = "auto"`` replaced by the precision to use on a CPU.

    Args:
        recorded: the precision that the run's last start measured, so that it is not measured again.
    """
    if recorded:
        precision = Precision(**recorded)
    elif any(spec.dtype == "auto" for spec in specs.values()):
        precision = trainer.precision_on_processor()
    else:
        return dict(specs)
    return {name: replace(spec, on_processor=precision) for name, spec in specs.items()}


def total_steps(config: RunFile, rows_per_epoch: int) -> int:
    """``run.steps``, or the number of steps for ``run.epochs`` passes over the data, rounded up."""
    if config.run.steps is not None:
        return config.run.steps
    steps = config.run.epochs * rows_per_epoch / config.data.batch_size
    if steps > MAX_STEPS:
        raise ConfigError(
            f"run.epochs = {config.run.epochs:g} passes over {rows_per_epoch} rows, {config.data.batch_size} per step, "
            f"need {steps:.3g} steps; a run has at most {MAX_STEPS}. Lower run.epochs, or set run.steps."
        )
    return max(1, math.ceil(steps))
