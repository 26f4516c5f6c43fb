"""Loads the models of a run where the launcher puts them, and starts what draws samples and scores them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from rlhf.interfaces import (
    GENERATOR,
    Generator,
    GeneratorSpec,
    Launcher,
    ModelSpec,
    ReadRole,
    Rollout,
    ScoreWithRole,
)

from rlhf_runtime.data.tokenizer import Decoder, tokens_of
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.shared_devices import Phases
from rlhf_runtime.models.shared_heads import lend
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_runtime.observe.signals import StopRequest
from rlhf_runtime.rewards.reward_models import read_role, score_with_role
from rlhf_runtime.rewards.scoring import Scorer
from rlhf_runtime.samples.rollouts import Rollouts
from rlhf_runtime.samples.sampling import NoGenerator, Sampler
from rlhf_runtime.setup.prepare import Prepared
from rlhf_runtime.workers.main_thread import MainThread


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
    for name in sorted(prepared.specs, key=lambda name: not prepared.section(name).precompute):
        load = functools.partial(_launch_role, name, prepared, launcher)
        if prepared.section(name).precompute and precomputed is not None:
            found[name] = precomputed(prepared.specs[name], load)
        else:
            found[name] = _base_of(name, prepared, found) or load()
    roles = {name: found[name] for name in prepared.specs}
    lend(prepared.algorithm.needs().lent, roles)
    return roles


def _launch_role(name: str, prepared: Prepared, launcher: Launcher) -> Role:
    trainer, spec = prepared.trainer(name), prepared.specs[name]
    group = launcher.launch_trainer(trainer.resolved.cls, trainer.config, spec)
    return Role(spec, group, prepared.section(name).micro_tokens)


def _base_of(name: str, prepared: Prepared, roles: Mapping[str, Role]) -> Role | None:
    """A frozen role that starts as another role's model is that model without its adapters, where it trains some."""
    source = roles.get(prepared.base_of(name, prepared.places) or "")
    if source is None or name in prepared.schedule.snapshots or "base" not in source.facts.views:
        return None
    return Role(prepared.specs[name], source.group, source.budget, view="base")


def launch_sampler(
    prepared: Prepared,
    rollout: Rollout,
    roles: Mapping[str, Role],
    launcher: Launcher,
    note: Callable[[str], None],
    resources: ExitStack,
    stop: StopRequest | None = None,
) -> Sampler:
    """Start the generator and set up the rewards.

    Args:
        resources: gets what releases everything that was started.
        stop: says whether the run was asked to stop.
    """
    policy, config, template, episodes = roles["policy"], prepared.config, prepared.data.template, prepared.episodes
    spec = GeneratorSpec(
        tuple(dict.fromkeys((*policy.facts.eos_token_ids, *template.end_token_ids))),
        Decoder(policy.spec.path, policy.spec.trust_remote_code),
        policy.spec.path,
        policy.facts.dtype,
        policy.spec.trust_remote_code,
        config.data.max_tokens,
        config.run.seed,
        config.sync.timeout,
    )
    selected = prepared.parts.get(GENERATOR)
    generator: Generator = NoGenerator(None, spec)
    if selected is not None:
        generator = launcher.launch_generator(selected.resolved.cls, selected.config, spec)
    resources.callback(generator.close)
    if selected is not None:
        launcher.link(policy.group, generator, config.sync.timeout)
    main = MainThread(stop)
    resources.callback(main.close)
    scorer = make_scorer(prepared, score_with_role(roles, main), read_role(roles, main))
    resources.callback(scorer.close)
    if episodes is not None:
        resources.callback(episodes.close)
    main.run(scorer.setup())
    phases = Phases(generator, roles, prepared.places)
    rollouts = Rollouts(
        rollout,
        generator,
        template,
        scorer,
        main,
        episodes.open if episodes is not None else None,
        episodes.limit if episodes is not None else None,
        phases,
    )
    weights = WeightSync(policy, generator, config.sync, config.run.seed, note, config.data.max_tokens)
    return Sampler(rollouts, weights, phases)


def make_scorer(prepared: Prepared, score: ScoreWithRole, read: ReadRole) -> Scorer:
    """The run's rewards.

    Args:
        score, read: how rewards ask the models that the run holds for them (:mod:`rlhf_runtime.rewards.reward_models`).
    """
    return Scorer(
        prepared.rewards,
        score_with_role=score,
        read_role=read,
        tokens=tokens_of(prepared.tokenizer),
        seed=prepared.config.run.seed,
        turn_credit=prepared.config.env.credit if prepared.config.env is not None else "outcome",
    )
