"""Resolves the plugins of a run, their options and the roles that they need, before the data is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR, Algorithm, Generator, ModelSpec, Place, Reward, Rollout, Trainer
from rlhf.interfaces.launcher import check_workers
from rlhf.ops.batch import Batch
from rlhf.ops.sample_values import ENV
from rlhf.plugins import Plugins, Resolved
from rlhf.types import Needs, RoleSpec, RunOptions, Sampling
from rlhf_hub.hub import Commits
from rlhf_hub.processors import reads_images
from rlhf_hub.published import pinned

from rlhf_runtime.calls.algorithm_calls import ask, needs_of
from rlhf_runtime.config.components import Selection, Selections
from rlhf_runtime.config.placement import divided, placement
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import GROUP, EvalSection, ModelSection, section_path
from rlhf_runtime.rewards.scoring import ActiveReward


@dataclass(frozen=True)
class RunPlugins:
    """The plugins of a run and the roles that they declare."""

    config: RunFile
    """The run file with every option of every plugin filled in."""
    selections: Selections
    """Every plugin that the run file names, whether this run uses it or not."""
    algorithm: Algorithm
    parts: Mapping[str, Selection]
    """``launcher``, ``trainer``, ``generator``, ``rollout``, ``env``, ``curriculum``: the parts that this run uses."""
    rewards: Sequence[ActiveReward]
    roles: Mapping[str, RoleSpec]
    rollout: Rollout | None
    """None if the run samples nothing."""
    scored: bool
    """Whether answers must get a reward, and the rollout gives none itself."""
    commits: Commits
    """The commits of the models and data that the run names on the hub."""

    @property
    def online(self) -> bool:
        return self.algorithm.data == "prompts"

    @property
    def trains(self) -> bool:
        """Whether the run file's algorithm is used. False for a job (:func:`job_plugins`)."""
        return "algorithm" in self.selections

    @property
    def plugins(self) -> list[Resolved]:
        """Every plugin that the run uses."""
        observers = [f"observer.{number}" for number in range(len(self.config.observer))]
        resolved = self.selections.algorithm.plugins() if self.trains else []
        resolved += [part.resolved for part in self.parts.values()]
        resolved += [self.selections[path].resolved for path in observers if path in self.selections]
        resolved += [reward.resolved for reward in self.rewards]
        return list({(plugin.kind, plugin.ref): plugin for plugin in resolved}.values())

    @property
    def has_rewards(self) -> bool:
        """Whether a reward of the run file gives values. Rewards that are teachers give none."""
        return any(not reward.instance.is_teacher for reward in self.rewards)

    @property
    def trainer_class(self) -> type[Trainer]:
        """The class of the trainer of every role."""
        cls: type[Trainer] = self.parts["trainer"].resolved.cls
        return cls

    @property
    def generator_class(self) -> type[Generator] | None:
        """None if the run has no generator."""
        return self.parts[GENERATOR].resolved.cls if GENERATOR in self.parts else None

    def check_sampling(self, sampling: Sampling) -> None:
        """Refuse sampling parameters with which the run's generator cannot sample exactly."""
        if self.generator_class is not None:
            self.generator_class.check_sampling(self.parts[GENERATOR].config, sampling)

    @property
    def evaluation(self) -> EvalSection:
        """``[eval]``. If the section sets no threshold of passing, the threshold of the rewards is filled in."""
        section = self.config.eval
        marked = all(reward.instance.passes_at_one for reward in self.rewards)
        return (
            section.model_copy(update={"pass_threshold": 1.0}) if section.pass_threshold is None and marked else section
        )

    def trainer(self, role: str) -> Selection:
        """The trainer, with the role's own options."""
        path = f"{section_path(role)}.trainer"
        return self.selections[path] if self.section(role).trainer else self.parts["trainer"]

    def section(self, role: str) -> ModelSection:
        """The run file's section about a role's model."""
        return self.config.models.get(section_path(role)) or ModelSection()

    def model(self, role: str) -> str:
        """Path or ``owner/name@commit`` of a role's model. It is set by the role's section, else by its RoleSpec, else
        it is the model of the role that it is declared ``like``."""
        declared, path = self.roles[role], section_path(role)
        model = self.section(role).model or declared.model
        if model is None and declared.like is not None:
            return self.model(declared.like)
        if model is None:
            raise ConfigError(f"no model is named for the role {role!r}; set --{path}.model PATH")
        return pinned(model, self.commits)

    def spec(self, role: str, updates: int = 0, ranks: int = 1, images: bool = False) -> ModelSpec:
        """What the trainer loads for a role. If a role is declared ``like`` another and its section sets neither model
        nor precision, it takes both from the other role.

        Args:
            updates: optimizer steps of the whole run.
            images: whether the data has images, even if the run file does not say so.
        """
        declared, data = self.roles[role], self.config.data
        section = self.section(role)
        like = self.section(declared.like) if declared.like is not None else section
        storage = section.storage or like.storage or "fp32"
        dtype = section.dtype if section.dtype != "auto" else like.dtype
        model, has_images = self.model(role), images or data.images is not None or bool(data.max_images)
        # The algorithm's roles read the batches. Roles of rewards read what their reward passes to them.
        reads_batches = any(r.name == role for r in self.algorithm.needs().roles)
        return ModelSpec(
            declared,
            model,
            "bf16" if dtype == "auto" and storage == "bf16" else dtype,
            section.gradient_checkpointing,
            section.trust_remote_code or (section.model is None and like.trust_remote_code),
            self.config.run.seed,
            updates,
            world_size=ranks,
            storage=storage,
            images=has_images and (reads_batches or "policy" in (role, declared.like) or reads_images(model)),
        )

    def engine_images(self, policy: ModelSpec) -> int:
        """Largest number of images in a request to the generator. 0 if neither the run file nor the rows have images,
        and no environment or program can show images."""
        may_show = self.rollout is not None and (self.rollout.needs_env or self.rollout.needs_messages)
        return self.config.data.image_limit if (policy.images or may_show) and reads_images(policy.path) else 0

    def places_on(self, device: str) -> dict[str, Place]:
        """The placement of every role, and of the generator if there is one.

        Args:
            device: ``cpu`` | ``cuda``, the kind of devices as far as it is known.

        Raises ConfigError if a placement section conflicts with another one, or an engine does not fit its devices.
        """
        sections, roles, engines = self.config.placement, list(self.roles), GENERATOR in self.parts
        if not self.trains:  # the run file may be from a run with more parts
            parts = {*roles, *([GENERATOR] if engines else [])}
            sections = {name: section for name, section in sections.items() if name in parts}
        places = placement(sections, roles, engines)
        if GENERATOR in places and "processes" in self.parts["launcher"].resolved.cls.capabilities:
            selection, place = self.parts[GENERATOR], places[GENERATOR]
            generator = selection.resolved.cls
            places[GENERATOR] = divided(place, generator.name, generator.parallel_sizes(selection.config))
            check_workers(places, device)
        return places

    def base_of(self, role: str, places: Mapping[str, Place]) -> str | None:
        """The role whose initial model is the model of a frozen role. If the other role trains adapters, the frozen
        role may be the same model without them.

        None if the run file sets anything for the frozen role (placement, precision, trainer) that would be ignored.
        Only ``share`` with the other role is allowed: it avoids reserving devices.
        """
        declared = self.roles[role]
        source = declared.like
        if source is None or source not in self.roles or declared.trained or declared.head != self.roles[source].head:
            return None
        is_separate = role in self.config.placement and not _shares_devices(self.config, places, role, source)
        if is_separate or self.section(role) != ModelSection():
            return None
        return source if self.model(role) == self.model(source) else None


def device_here() -> str:
    """``cpu`` | ``cuda``: the device of this machine on which trainers would run. Loads no model."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class Job(Algorithm):
    """The algorithm of a job that trains nothing. It has no roles."""

    name = "job"

    def needs(self) -> Needs:
        return Needs(())

    def assemble(self, examples: Sequence[object]) -> tuple[Batch | None, dict[str, float]]:
        return None, {}

    def updates(self, step: int, batch: Batch | None = None) -> list:
        return []


def run_plugins(config: RunFile, plugins: Plugins, scored: bool = True, commits: Commits | None = None) -> RunPlugins:
    """Resolve the plugins of a run, check their options, and build the plugins that declare the needs of the run.

    Args:
        scored: whether answers must get a reward.
        commits: the commits that a resumed run recorded; None: hub names are looked up now.

    Raises ConfigError or PluginError, with a message that says what to change.
    """
    plugins.check_requirements(config.run.requires)
    selections = Selections.of(plugins, config)
    algorithm = selections.algorithm.build(run_options(selections))
    selections = replace(selections, config=_with_group_size(selections.config, algorithm))
    return _with_parts(selections, algorithm, active_rewards(selections), scored, commits)


def _with_group_size(config: RunFile, algorithm: Algorithm) -> RunFile:
    """The run file with the default of ``sampling.samples_per_prompt`` for an algorithm that compares samples."""
    smallest, sampling = needs_of(algorithm).group_min, config.sampling
    if algorithm.data != "prompts" or smallest < 2 or "samples_per_prompt" in sampling.model_fields_set:
        return config
    sampling = sampling.model_copy(update={"samples_per_prompt": max(GROUP, smallest)})
    return config.model_copy(update={"sampling": sampling})


def job_plugins(
    config: RunFile,
    plugins: Plugins,
    algorithm: Job,
    kinds: Collection[str],
    scored: bool,
    commits: Commits | None = None,
) -> RunPlugins:
    """The plugins of a job that trains nothing. The algorithm of the run file is ignored.

    Args:
        algorithm: algorithm of the job. The job has its roles and the roles of rewards. Sections of other roles, and
            rewards that are teachers, are not read.
        kinds: kinds of plugins that the job selects in addition to the rewards.
    """
    plugins.check_requirements(config.run.requires)
    of_rewards = Selections.of(plugins, config, ("reward",))
    values = [section for number, section in enumerate(config.reward) if not is_teacher(of_rewards, number)]
    if len(values) < len(config.reward):
        scored = scored and (bool(values) or config.env is not None)
        of_rewards = Selections.of(plugins, config.model_copy(update={"reward": values}), ("reward",))
    rewards = active_rewards(of_rewards)
    roles = {"policy", *declared_roles(algorithm, rewards)}
    selections = Selections.of(plugins, of_rewards.config, kinds, roles)
    return _with_parts(selections, algorithm, rewards, scored, commits)


def _with_parts(
    selections: Selections,
    algorithm: Algorithm,
    rewards: Sequence[ActiveReward],
    scored: bool,
    commits: Commits | None,
) -> RunPlugins:
    config, kinds = selections.config, ["launcher", "trainer"]
    roles = declared_roles(algorithm, rewards)
    rollout = None
    if algorithm.data == "prompts" or rewards or config.env is not None:  # an offline run may be evaluated by rollouts
        rollout = selections["rollout"].build()
        kinds += ["rollout", *([GENERATOR] if rollout.needs_generator else []), *(["env"] if config.env else [])]
    kinds += ["curriculum"] if config.curriculum is not None and "curriculum" in selections else []
    parts = {kind: selections[kind] for kind in kinds}
    scored = scored and not (rollout is not None and rollout.gives_rewards)
    return RunPlugins(config, selections, algorithm, parts, rewards, roles, rollout, scored, commits or Commits())


def run_options(selections: Selections) -> RunOptions:
    """The options outside the algorithm's section that the algorithm may read."""
    config = selections.config
    taught = [is_teacher(selections, number) for number in range(len(config.reward))]
    rewards = [section for section, is_teacher in zip(config.reward, taught, strict=True) if not is_teacher]
    teachers = {s.label: s.sources for s, is_teacher in zip(config.reward, taught, strict=True) if is_teacher}
    step_sources = {section.label: section.weight for section in rewards if section.credit == "step"}
    weights = {section.label: section.weight for section in rewards if section.credit != "step"}
    if config.env is not None:
        (step_sources if config.env.credit == "step" else weights)[ENV] = 1.0
    sources = tuple(source.label for source in config.data.train)
    return RunOptions(config.data.max_tokens, step_sources, sources, weights, teachers)


def is_teacher(selections: Selections, number: int) -> bool:
    """Whether a reward of the run file gives log-probs of a teacher."""
    cls: type[Reward] = selections[f"reward.{number}"].resolved.cls
    return cls.is_teacher


def active_rewards(selections: Selections) -> list[ActiveReward]:
    """The rewards of the run file, built."""
    rewards = []
    for number, s in enumerate(selections.config.reward):
        selected = selections[f"reward.{number}"]
        options = (s.weight, s.deadline, s.retries, s.credit, s.concurrency, s.sources, s.python)
        rewards.append(ActiveReward(s.label, selected.resolved, selected.build(), selected.config, *options))
    return rewards


def declared_roles(algorithm: Algorithm, rewards: Sequence[ActiveReward]) -> dict[str, RoleSpec]:
    """The roles of a run by name. Raises ConfigError if two plugins declare a role differently, and PluginInvalid if a
    reward declares something else."""
    declared: dict[str, tuple[RoleSpec, str]] = {}
    declarations = [(role, f"algorithm {algorithm.name!r}") for role in algorithm.needs().roles]
    declarations += [(role, f"reward {r.name!r}") for r in rewards for role in ask(r.instance, "roles")]
    for role, owner in declarations:
        first, other = declared.setdefault(role.name, (role, owner))
        if first != role:
            raise ConfigError(
                f"{other} and {owner} declare the role {role.name!r} differently: {first} and {role}. Give {owner} "
                "another role: with its option `role`, if it has one, or in its roles()"
            )
    return {name: role for name, (role, _) in declared.items()}


def _shares_devices(config: RunFile, places: Mapping[str, Place], name: str, other: str) -> bool:
    """Whether a role is placed on the devices of another one, and its number of ranks is equal or not set."""
    place, source = places[name], places[other]
    is_free = config.placement[name].ranks is None
    return place.share in (other, source.share or other) and (is_free or place.ranks == source.ranks)
