"""Everything about a run that can be wrong before a model is loaded: plugins, options, needs, data, schedule.

``--dry-run`` stops after this.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.components import Selection, build_algorithm, resolved_run, select
from rlhf.controller.episodes import Episodes
from rlhf.controller.scoring import ActiveReward
from rlhf.data.dataset import TrainData
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import ConfigError
from rlhf.interfaces import Algorithm, ModelSpec, Observer, Place, Rollout
from rlhf.placement import placement
from rlhf.plugins import Plugins, Resolved, check_requirements
from rlhf.runfile import Choice, ModelSection, RunFile
from rlhf.types import RoleSpec, Update
from rlhf.validation import check


@dataclass
class Prepared:
    """A run that could start."""

    config: RunFile
    """With every option of every plugin filled in."""
    algorithm: Algorithm
    data: TrainData
    tokenizer: Any
    total_steps: int
    specs: dict[str, ModelSpec]
    """By role."""
    snapshots: frozenset[str]
    """Roles whose weights the algorithm replaces on the way: they are in the checkpoint like trained ones."""
    parts: dict[str, Selection]
    """``launcher``, ``trainer``, ``generator``, ... and, per role with options of its own, ``trainer.<role>``."""
    rewards: list[ActiveReward]
    rollout: Rollout | None
    episodes: Episodes | None
    observers: dict[str, Observer]
    plugins: list[Resolved]
    """Every plugin the run uses."""
    places: dict[str, Place]
    """Of every role, and of the generator where there is one."""

    @property
    def online(self) -> bool:
        return self.algorithm.data == "prompts"


def prepare(config: RunFile, plugins: Plugins, scored: bool = True) -> Prepared:
    """Resolve and check.

    Args:
        scored: whether answers must get a reward.

    Raises ConfigError, PluginError, DataError or ModelError saying what to change.
    """
    check_requirements(config.run.requires)
    config = resolved_run(plugins, config)
    algorithm, used = build_algorithm(plugins, config.algorithm, config.origins)
    online = algorithm.data == "prompts"
    parts = {k: select(plugins, k, getattr(config, k), k, config.origins) for k in ("launcher", "trainer")}
    rewards = [_reward(plugins, config, number) for number in range(len(config.reward))]
    roles = _roles(algorithm, rewards)
    rollout, env = None, None
    if online or rewards or config.env is not None:  # an offline run may be evaluated by rollouts
        parts["rollout"] = select(plugins, "rollout", config.rollout, "rollout", config.origins)
        rollout = parts["rollout"].build()
        if rollout.needs_generator:
            parts["generator"] = select(plugins, "generator", config.generator, "generator", config.origins)
        if config.env is not None:
            env = parts["env"] = select(plugins, "env", config.env, "env", config.origins)
    check(
        config,
        algorithm,
        rollout_needs_env=rollout is not None and rollout.needs_env,
        reward_roles=[role for r in rewards for role in r.instance.roles()],
        generator=parts["generator"].resolved.cls if "generator" in parts else None,
        trainer=parts["trainer"].resolved.cls,
        scored=scored,
    )
    algorithm.step_sources = {r.name: r.weight for r in rewards if r.credit == "step"}
    for name in roles:
        if own := _section(config, name).trainer:
            where = f"{name}.trainer" if name in ("policy", "critic", "reference") else f"roles.{name}.trainer"
            merged = Choice(use=config.trainer.use, options={**config.trainer.options, **own})
            parts[f"trainer.{name}"] = select(plugins, "trainer", merged, where, config.origins)
    observers = {}
    for number, choice in enumerate(config.observer):
        observers[choice.label] = select(plugins, "observer", choice, f"observer.{number}", config.origins)
    policy = _model(config, roles, "policy")
    tokenizer = load_tokenizer(policy, config.policy.trust_remote_code)
    data = TrainData(config.data, tokenizer, algorithm.data, config.run.seed)
    if rollout is not None and rollout.needs_env:
        data.template.check_multi_turn()
    steps = total_steps(config, data.rows_per_epoch)
    updates, snapshots = _schedule(algorithm, steps)
    places = placement(config.placement, list(roles), "generator" in parts)
    used += [s.resolved for s in (*parts.values(), *observers.values())] + [r.resolved for r in rewards]
    return Prepared(
        config,
        algorithm,
        data,
        tokenizer,
        steps,
        {name: _spec(config, roles, name, updates.get(name, 0), places[name].ranks) for name in roles},
        snapshots,
        parts,
        rewards,
        rollout,
        Episodes(env.resolved, env.config, config.env) if env is not None and config.env is not None else None,
        {name: selection.build() for name, selection in observers.items()},
        list({(r.kind, r.ref): r for r in used}.values()),
        places,
    )


def total_steps(config: RunFile, rows_per_epoch: int) -> int:
    """``run.steps``, or as many as ``run.epochs`` passes over the data take (the last step may go over)."""
    if config.run.steps is not None:
        return config.run.steps
    return max(1, math.ceil(config.run.epochs * rows_per_epoch / config.data.batch_size))


def _reward(plugins: Plugins, config: RunFile, number: int) -> ActiveReward:
    section = config.reward[number]
    selection = select(plugins, "reward", section, f"reward.{number}", config.origins)
    return ActiveReward(
        section.label,
        selection.resolved,
        selection.build(),
        selection.config,
        section.weight,
        section.deadline,
        section.retries,
        section.credit,
    )


def _roles(algorithm: Algorithm, rewards: Sequence[ActiveReward]) -> dict[str, RoleSpec]:
    roles: dict[str, RoleSpec] = {}
    for role in (*algorithm.needs().roles, *(role for r in rewards for role in r.instance.roles())):
        if roles.setdefault(role.name, role) != role:
            raise ConfigError(f"two components declare the role {role.name!r} differently; give one reward a name")
    return roles


def _section(config: RunFile, role: str) -> ModelSection:
    if role in ("policy", "critic", "reference"):
        return getattr(config, role)
    return config.roles.get(role, ModelSection())


def _model(config: RunFile, roles: Mapping[str, RoleSpec], name: str) -> str:
    """Which model a role holds: its own section's, the one its declarer knows, or that of the role it is like."""
    role = roles[name]
    own = _section(config, name).model or role.model
    if own is None and role.like is not None:
        return _model(config, roles, role.like)
    if own is None:
        raise ConfigError(f"no model is named for the role {name!r}; set --roles.{name}.model PATH")
    return own


def _spec(config: RunFile, roles: Mapping[str, RoleSpec], name: str, updates: int, ranks: int) -> ModelSpec:
    """A role whose section names neither model nor precision takes both from the role it is like."""
    own, role = _section(config, name), roles[name]
    like = _section(config, role.like) if role.like is not None else own
    return ModelSpec(
        role,
        _model(config, roles, name),
        own.dtype if own.dtype != "auto" else like.dtype,
        own.gradient_checkpointing,
        own.trust_remote_code or (own.model is None and like.trust_remote_code),
        config.run.seed,
        updates,
        world_size=ranks,
    )


def _schedule(algorithm: Algorithm, steps: int) -> tuple[Counter[str], frozenset[str]]:
    """({role: optimizer steps of the whole run}, which its learning-rate schedule spans; roles that are snapshots)."""
    count: Counter[str] = Counter()
    snapshots = set()
    for step in range(steps):
        for update in algorithm.updates(step):
            if isinstance(update, Update):
                count[update.role] += update.epochs * update.minibatches
            else:
                snapshots.add(update.role)
    return count, frozenset(snapshots)
