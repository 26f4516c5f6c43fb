"""What a run is made of, before its data is read: plugins with their options, and the roles that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR, Algorithm, ModelSpec, Place, Rollout, Trainer
from rlhf.interfaces.launcher import check_workers
from rlhf.plugins import Plugins, Resolved, check_requirements
from rlhf.types import RoleSpec
from rlhf_hub.published import pinned

from rlhf_runtime.config.components import Selection, build_algorithm, resolved_run, select
from rlhf_runtime.config.placement import divided, placement
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import Choice, ModelSection
from rlhf_runtime.config.validation import check
from rlhf_runtime.rewards.scoring import ActiveReward

_NAMED = ("policy", "critic", "reference")
"""Roles with a section of their own; others are under ``[roles]``."""


@dataclass
class RunParts:
    """Parts that fit together."""

    config: RunFile
    """With every option of every plugin filled in."""
    algorithm: Algorithm
    parts: dict[str, Selection]
    """``launcher``, ``trainer``, ``generator``, ``rollout``, ``env``; and ``trainer.<role>`` for a role with options of
    its own."""
    rewards: list[ActiveReward]
    roles: dict[str, RoleSpec]
    rollout: Rollout | None
    used: list[Resolved]
    """Plugins of the algorithm and its slots; those of ``parts`` and ``rewards`` come beside them."""

    @property
    def online(self) -> bool:
        return self.algorithm.data == "prompts"

    @property
    def trainer_class(self) -> type[Trainer]:
        """The class of the trainer of every role."""
        cls: type[Trainer] = self.parts["trainer"].resolved.cls
        return cls

    def device_here(self) -> str:
        """``cpu`` | ``cuda``: where this machine would run the trainers."""
        return self.trainer_class.device_here()

    def trainer(self, role: str) -> Selection:
        """With the role's own options."""
        return self.parts.get(f"trainer.{role}", self.parts["trainer"])


def run_parts(config: RunFile, plugins: Plugins, scored: bool = True) -> RunParts:
    """Resolve plugins, check options and what the parts need of each other.

    Args:
        scored: whether answers must get a reward.

    Raises ConfigError or PluginError saying what to change.
    """
    check_requirements(config.run.requires)
    config = resolved_run(plugins, config)
    algorithm, used = build_algorithm(plugins, config.algorithm, config.origins)
    parts = {k: select(plugins, k, getattr(config, k), k, config.origins) for k in ("launcher", "trainer")}
    rewards = [active_reward(plugins, config, number) for number in range(len(config.reward))]
    roles = _roles(algorithm, rewards)
    rollout = None
    if algorithm.data == "prompts" or rewards or config.env is not None:  # an offline run may be evaluated by rollouts
        parts["rollout"] = select(plugins, "rollout", config.rollout, "rollout", config.origins)
        rollout = parts["rollout"].build()
        if rollout.needs_generator:
            parts["generator"] = select(plugins, "generator", config.generator, "generator", config.origins)
        if config.env is not None:
            parts["env"] = select(plugins, "env", config.env, "env", config.origins)
    check(
        config,
        algorithm,
        rollout_needs_env=rollout is not None and rollout.needs_env,
        rollout_replays_env=rollout is not None and rollout.replays_env,
        reward_roles=[role for r in rewards for role in r.instance.roles()],
        generator=parts["generator"].resolved.cls if "generator" in parts else None,
        trainer=parts["trainer"].resolved.cls,
        scored=scored,
    )
    for name in roles:
        if own := section_of(config, name).trainer:
            where = where_trainer(name)
            merged = Choice(use=config.trainer.use, options={**config.trainer.options, **own})
            parts[f"trainer.{name}"] = select(plugins, "trainer", merged, where, config.origins)
    return RunParts(config, algorithm, parts, rewards, roles, rollout, used)


def places_of(made: RunParts, device: str) -> dict[str, Place]:
    """Where every role lives, and the generator where there is one.

    Args:
        device: ``cpu`` | ``cuda``, what the devices are as far as is known here.

    Raises ConfigError where a section does not fit the others, or an engine its devices.
    """
    places = placement(made.config.placement, list(made.roles), GENERATOR in made.parts)
    if GENERATOR in places and "processes" in made.parts["launcher"].resolved.cls.capabilities:
        chosen, place = made.parts[GENERATOR], places[GENERATOR]
        generator = chosen.resolved.cls
        places[GENERATOR] = divided(place, generator.name, generator.parallel_sizes(chosen.config))
        check_workers(places, device)
    return places


def where_trainer(role: str) -> str:
    """The section of a role's own trainer options."""
    return f"{role}.trainer" if role in _NAMED else f"roles.{role}.trainer"


def section_of(config: RunFile, role: str) -> ModelSection:
    """The run file's section about a role's model."""
    if role in _NAMED:
        section: ModelSection = getattr(config, role)
        return section
    return config.roles.get(role, ModelSection())


def model_of(config: RunFile, roles: Mapping[str, RoleSpec], name: str) -> str:
    """Which model a role holds: its own section's, the one its declarer knows, or that of the role it is like. A hub
    name becomes the one commit that it means in this run."""
    role = roles[name]
    own = section_of(config, name).model or role.model
    if own is None and role.like is not None:
        return model_of(config, roles, role.like)
    if own is None:
        raise ConfigError(f"no model is named for the role {name!r}; set --roles.{name}.model PATH")
    return pinned(own)


def model_spec(
    config: RunFile, roles: Mapping[str, RoleSpec], name: str, updates: int = 0, ranks: int = 1
) -> ModelSpec:
    """A role whose section names neither model nor precision takes both from the role it is like.

    Args:
        updates: optimizer steps of the whole run.
    """
    own, role = section_of(config, name), roles[name]
    like = section_of(config, role.like) if role.like is not None else own
    return ModelSpec(
        role,
        model_of(config, roles, name),
        own.dtype if own.dtype != "auto" else like.dtype,
        own.gradient_checkpointing,
        own.trust_remote_code or (own.model is None and like.trust_remote_code),
        config.run.seed,
        updates,
        world_size=ranks,
    )


def base_of(config: RunFile, roles: Mapping[str, RoleSpec], places: Mapping[str, Place], name: str) -> str | None:
    """The role whose model a frozen role starts as, so that it may be that model without its adapters, where that role
    trains some.

    None where the run file says anything about the role (its place, precision, trainer) that would be ignored. That it
    shares the devices of the other role is where it is in any case: said, so that no devices are kept for it.
    """
    role = roles[name]
    source = role.like
    if source is None or source not in roles or role.trained or role.head != roles[source].head:
        return None
    elsewhere = name in config.placement and not _beside(config, places, name, source)
    if elsewhere or section_of(config, name) != ModelSection():
        return None
    return source if model_of(config, roles, name) == model_of(config, roles, source) else None


def _beside(config: RunFile, places: Mapping[str, Place], name: str, other: str) -> bool:
    """Whether a role is placed on the devices of another one, with as many ranks or none named."""
    place, source = places[name], places[other]
    named = "ranks" in config.placement[name].model_fields_set
    return place.share in (other, source.share or other) and (not named or place.ranks == source.ranks)


def active_reward(plugins: Plugins, config: RunFile, number: int) -> ActiveReward:
    """The section ``[[reward]]`` of that number, resolved."""
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
        section.concurrency,
    )


def _roles(algorithm: Algorithm, rewards: Sequence[ActiveReward]) -> dict[str, RoleSpec]:
    declared: dict[str, tuple[RoleSpec, str]] = {}
    asked = [(role, f"algorithm {algorithm.name!r}") for role in algorithm.needs().roles]
    for role, who in asked + [(role, f"reward {r.name!r}") for r in rewards for role in r.instance.roles()]:
        first, other = declared.setdefault(role.name, (role, who))
        if first != role:
            raise ConfigError(
                f"{other} and {who} declare the role {role.name!r} differently: {first} and {role}. Give {who} another "
                "role: with its option `role`, where it has one, or in its roles()"
            )
    return {name: role for name, (role, _) in declared.items()}
