"""Loads the models of a run on the devices that the launcher assigns, and starts the sampler and the rewards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

from rlhf.errors import CapabilityError
from rlhf.interfaces import (
    GENERATOR,
    EnginePool,
    Generator,
    GeneratorSpec,
    Launcher,
    ModelSpec,
    Offloads,
    ReadRole,
    ScoreWithRole,
)

from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.checks.parts import with_adapters
from rlhf_runtime.config.placement import neighbours
from rlhf_runtime.data.image_tokens import ImageTokens
from rlhf_runtime.data.tokenizer import TokenDecoder, embedding_rows, tokens_of
from rlhf_runtime.loop.signals import StopRequest
from rlhf_runtime.models.roles import Role, lend
from rlhf_runtime.models.shared_devices import Phases
from rlhf_runtime.models.weight_sync import NoGenerator, WeightSync
from rlhf_runtime.observe.progress import phase
from rlhf_runtime.observe.timeline import NO_TIMELINE, Timeline
from rlhf_runtime.rewards.reward_models import read_role, score_with_role
from rlhf_runtime.rewards.scoring import Scorer
from rlhf_runtime.samples.rollouts import Rollouts, Sampler
from rlhf_runtime.samples.sample_context import SampleParts
from rlhf_runtime.setup.prepare import PlacedPlugins, Prepared


def launch_roles(
    prepared: PlacedPlugins,
    launcher: Launcher,
    precomputed: Callable[[ModelSpec, Callable[[], Role]], Role] | None = None,
    reports: Path | None = None,
) -> dict[str, Role]:
    """Load every role's model on the devices that the launcher assigns.

    Args:
        precomputed: makes a role from (its spec, a function that loads its model), for roles that the run file asks to
            precompute. They are made first, so that their models are unloaded before the others are loaded.
        reports: folder for the launcher's reports about failures; None: the working directory.
    """
    config = prepared.config
    loaded_roles: dict[str, Role] = {}
    launcher.place(prepared.places, prepared.plugins, reports)
    if "generator" in prepared.parts:
        launcher.choose_link(prepared.parts["generator"].resolved.cls, config.sync.transport)
    for name in sorted(prepared.specs, key=lambda name: not prepared.section(name).precompute):
        load = functools.partial(_launch_role, name, prepared, launcher)
        if prepared.section(name).precompute and precomputed is not None:
            loaded_roles[name] = precomputed(prepared.specs[name], load)
        else:
            loaded_roles[name] = _base_of(name, prepared, loaded_roles) or load()
    roles = {name: loaded_roles[name] for name in prepared.specs}
    lend(prepared.algorithm.needs().loans, roles)
    return roles


def _launch_role(name: str, prepared: PlacedPlugins, launcher: Launcher) -> Role:
    trainer, spec = prepared.trainer(name), prepared.specs[name]
    with phase(f"loading {name}: {spec.path}"):
        group = launcher.launch_trainer(trainer.resolved.cls, trainer.config, spec)
    return Role(spec, group, prepared.section(name).micro_tokens)


def _base_of(name: str, prepared: PlacedPlugins, roles: Mapping[str, Role]) -> Role | None:
    """The other role whose model, with its adapters disabled, serves as this frozen role. None if this role needs its
    own model."""
    source = roles.get(prepared.base_of(name, prepared.places) or "")
    if source is None or prepared.specs[name].replaced or "base" not in source.facts.views:
        return None
    return Role(prepared.specs[name], source.group, source.budget, view="base")


def launch_sampler(
    prepared: Prepared,
    roles: Mapping[str, Role],
    launcher: Launcher,
    note: Callable[[str], None],
    resources: ExitStack,
    stop: StopRequest | None = None,
    timeline: Timeline = NO_TIMELINE,
) -> Sampler:
    """Start the generator and set up the rewards of a run with a rollout.

    Args:
        resources: receives the callbacks that release everything that was started.
        stop: tells whether the run was asked to stop.
        timeline: shows samples and rewards.
    """
    assert prepared.rollout is not None
    config, template, episodes = prepared.config, prepared.data.template, prepared.episodes
    images = template.images.tokens if roles["policy"].spec.images else None
    limit = min(template.images.limit, prepared.engine_images(roles["policy"].spec))
    generator, weights = launch_generator(
        prepared, roles["policy"], launcher, note, resources, template.end_token_ids, images, limit
    )
    pool = None
    if prepared.trains and config.stream.mode == "continuous" and config.stream.replay is None:
        pool = _require_pool(generator, launcher)
    main = MainThread(stop)
    resources.callback(main.close)
    scorer = make_scorer(prepared, score_with_role(roles, main), read_role(roles, main))
    resources.callback(scorer.close)
    names = [*(["the environment"] if episodes is not None else []), *(["rewards"] if prepared.rewards else [])]
    with phase(f"starting {' and '.join(names)}") if names else nullcontext():
        if episodes is not None:
            resources.callback(episodes.close)
            main.run(episodes.start())
        main.run(scorer.setup())
    offloading = {n: r for n, r in roles.items() if issubclass(prepared.trainer(n).resolved.cls, Offloads)}
    phases = Phases(generator, offloading, prepared.places, weights.refresh)
    parts = SampleParts(
        prepared.rollout,
        template,
        scorer,
        episodes,
        roles["policy"].facts.experts,
        prepared.check_sampling,
        embedding_rows(prepared.tokenizer),
    )
    rollouts = Rollouts(parts, generator, main, phases, pool, timeline)
    return Sampler(rollouts, weights, phases)


def launch_generator(
    plugins_of_run: PlacedPlugins,
    policy: Role,
    launcher: Launcher,
    note: Callable[[str], None],
    resources: ExitStack,
    end_token_ids: Sequence[int] = (),
    images: ImageTokens | None = None,
    image_limit: int = 0,
) -> tuple[Generator, WeightSync]:
    """Start the generator. Returns it, and the object that sends it the policy's weights.

    Args:
        end_token_ids: tokens that end an answer, in addition to the policy's end tokens.
        images: makes the tokens of images, if the run has images.
        image_limit: largest number of images in a request.
    """
    config = plugins_of_run.config
    spec = GeneratorSpec(
        eos_token_ids=tuple(dict.fromkeys((*policy.facts.eos_token_ids, *end_token_ids))),
        decode=TokenDecoder(policy.spec.path, policy.spec.trust_remote_code, plugins_of_run.tokenizer),
        path=policy.spec.path,
        dtype=policy.facts.dtype,
        trust_remote_code=policy.spec.trust_remote_code,
        max_tokens=config.data.max_tokens,
        seed=config.run.seed,
        sync_timeout=config.sync.timeout,
        in_flight=config.sync.in_flight,
        keys=config.sync.keys,
        max_images=image_limit,
        shares_devices=_shares_devices(plugins_of_run, launcher),
        experts=policy.facts.experts,
        storage=policy.spec.storage,
    )
    selected = plugins_of_run.parts.get(GENERATOR)
    generator: Generator = NoGenerator(None, spec)
    if selected is not None:
        spec = with_adapters(plugins_of_run, policy.spec, spec)
        cls, options = selected.resolved.cls, selected.config
        # `weights` sends to the generator, so it is made after the generator. The generator calls it only later.
        with phase(f"starting the generator {cls.name}"):
            generator = launcher.launch_generator(cls, options, spec, policy.group, lambda: weights.refresh())
    resources.callback(generator.close)
    weights = WeightSync(
        policy, generator, config.sync, config.run.seed, note, config.data.max_tokens, images, spec.adapters is not None
    )
    return generator, weights


def _require_pool(generator: Generator, launcher: Launcher) -> EnginePool:
    """The generator of a continuous stream. Raises CapabilityError if the launcher's generator is not a pool."""
    if isinstance(generator, EnginePool):
        return generator
    raise CapabilityError(
        f"stream.mode = 'continuous': launcher {launcher.name!r} launched generator {generator.name!r} as a "
        f"{type(generator).__name__}, which is not an rlhf.interfaces.EnginePool and does not answer single requests. "
        "Remove it, or use another --launcher.use or --generator.use."
    )


def _shares_devices(prepared: PlacedPlugins, launcher: Launcher) -> bool:
    """Whether a role is on the devices of the generator, by its placement or because everything is in one process."""
    places = prepared.places
    return GENERATOR in places and ("in_process" in launcher.capabilities or bool(neighbours(places, GENERATOR)))


def make_scorer(prepared: PlacedPlugins, score: ScoreWithRole, reader: ReadRole) -> Scorer:
    """The run's rewards.

    Args:
        score, reader: give rewards access to the run's models (:mod:`rlhf_runtime.rewards.reward_models`).
    """
    return Scorer(
        prepared.rewards,
        score_with_role=score,
        read_role=reader,
        tokens=tokens_of(prepared.tokenizer),
        seed=prepared.config.run.seed,
        turn_credit=prepared.config.env.credit if prepared.config.env is not None else "outcome",
    )
