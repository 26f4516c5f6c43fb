"""What starting a run would refuse, asked of the classes of its parts before anything is started."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR, GeneratorSpec, ModelSpec, Place
from rlhf.plugins import Plugins

from rlhf_runtime.config.components import select
from rlhf_runtime.config.problems import origin
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import Choice
from rlhf_runtime.samples.sampling import evaluation_sampling, training_sampling
from rlhf_runtime.setup.plugins import RunPlugins, where_trainer


def check_parts(made: RunPlugins, places: Mapping[str, Place], specs: Mapping[str, ModelSpec], here: bool) -> None:
    """Raises ConfigError, CapabilityError or PluginError, as the run itself would.

    Args:
        here: whether it would be started on this machine; else it is only planned.
    """
    config, chosen = made.config, made.parts["launcher"]
    launcher, generator = chosen.resolved.cls, made.parts.get(GENERATOR)
    launcher.check(chosen.config, places, generator.resolved.cls if generator else None, config.sync.transport)
    device = made.device_here() if here and launcher.here(chosen.config) else None
    for name, spec in specs.items():
        trainer = made.trainer(name)
        if here:
            trainer.resolved.cls.check_files(spec)
        trainer.resolved.cls.check(trainer.config, spec, device)
    if generator is not None and "policy" in specs:
        policy, data = specs["policy"], config.data
        engine = GeneratorSpec(
            (), str, policy.path, policy.dtype, policy.trust_remote_code, data.max_tokens, config.run.seed
        )
        samplings = [evaluation_sampling(config)] if data.eval else []
        samplings += [training_sampling(config)] if made.online else []
        generator.resolved.cls.check(generator.config, engine, samplings, device)


def idle_options(made: RunPlugins) -> list[str]:
    """Options in the own section of a role that is not trained which only training reads. What such a role takes over
    from ``[trainer]`` is there for those that are trained; a policy that only answers has its section from its
    training."""
    problems = []
    for name, role in made.roles.items():
        given = made.section(name).trainer
        trainer = made.trainer(name).resolved.cls
        for key in sorted(trainer.learning & given.keys()) if not role.trained and name != "policy" else ():
            where = f"{where_trainer(name)}.{key}"
            problems.append(
                f"{where}{origin(where, made.config.origins)}: {name} is not trained, so nothing reads it. Remove it; "
                "in [trainer] it is for the roles that are."
            )
    return problems


def unread_sections(made: RunPlugins, plugins: Plugins) -> list[str]:
    """``[rollout]`` and ``[generator]`` of a run that has none: options that differ from their plugin's defaults. The
    generator may be named all the same, as ``--backend`` names one for every run."""
    problems = []
    for kind in ("rollout", GENERATOR):
        section, usual = getattr(made.config, kind), RunFile.model_fields[kind].default
        if kind in made.parts or section == usual:
            continue
        try:
            plain = select(plugins, kind, Choice(use=section.use)).config.model_dump()
        except ConfigError:  # it has options without a default, so all of them were set
            plain = {}
        given = sorted(key for key, value in section.options.items() if key not in plain or plain[key] != value)
        named = [f"{kind}.{key}" for key in given]
        if kind == "rollout" and section.use != usual.use:
            named.insert(0, "rollout.use")
        if named:
            problems.append(f"{', '.join(named)}: set, but this run samples nothing, so nothing reads it. Remove it.")
    return problems
