"""Checks that need no started part: the classes of the parts are asked whether a run would be refused."""

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
from rlhf_runtime.setup.plugins import RunPlugins, device_here, where_trainer


def check_parts(
    plugins_of_run: RunPlugins, places: Mapping[str, Place], specs: Mapping[str, ModelSpec], here: bool
) -> None:
    """Raises ConfigError, CapabilityError or PluginError, as the run itself would.

    Args:
        here: whether the run would start on this machine. False: it is only planned.
    """
    config, selection = plugins_of_run.config, plugins_of_run.parts["launcher"]
    launcher, generator = selection.resolved.cls, plugins_of_run.parts.get(GENERATOR)
    launcher.check(selection.config, places, generator.resolved.cls if generator else None, config.sync.transport)
    device = device_here() if here and launcher.here(selection.config) else None
    for name, spec in specs.items():
        trainer = plugins_of_run.trainer(name)
        if here:
            trainer.resolved.cls.check_files(spec)
        trainer.resolved.cls.check(trainer.config, spec, device)
    if generator is not None and "policy" in specs:
        policy, data = specs["policy"], config.data
        engine = GeneratorSpec(
            (),
            str,
            policy.path,
            policy.dtype,
            policy.trust_remote_code,
            data.max_tokens,
            config.run.seed,
            in_flight=config.sync.in_flight,
            keys=config.sync.keys,
            max_images=plugins_of_run.engine_images(policy),
        )
        samplings = [evaluation_sampling(config)] if data.eval else []
        samplings += [training_sampling(config)] if plugins_of_run.online else []
        generator.resolved.cls.check(generator.config, engine, samplings, device)


def idle_options(plugins_of_run: RunPlugins) -> list[str]:
    """Problems with training-only options in the trainer section of a frozen role.

    Training-only options that the role inherits from ``[trainer]`` are allowed, because the trained roles read them.
    The policy is exempt: where it only answers, its section comes from the run that trained it.
    """
    problems = []
    for name, role in plugins_of_run.roles.items():
        options = plugins_of_run.section(name).trainer
        trainer = plugins_of_run.trainer(name).resolved.cls
        for key in sorted(trainer.learning & options.keys()) if not role.trained and name != "policy" else ():
            where = f"{where_trainer(name)}.{key}"
            problems.append(
                f"{where}{origin(where, plugins_of_run.config.origins)}: {name} is not trained, so nothing reads it. "
                "Remove it. In [trainer] the option applies to the trained roles."
            )
    return problems


def unread_sections(plugins_of_run: RunPlugins, plugins: Plugins) -> list[str]:
    """Problems with options of ``[rollout]`` and ``[generator]`` in a run without these parts. Options with their
    default values are allowed. ``generator.use`` is allowed too, because ``--backend`` sets it in every run."""
    problems = []
    for kind in ("rollout", GENERATOR):
        section, default = getattr(plugins_of_run.config, kind), RunFile.model_fields[kind].default
        if kind in plugins_of_run.parts or section == default:
            continue
        try:
            plain = select(plugins, kind, Choice(use=section.use)).config.model_dump()
        except ConfigError:  # the plugin has options without a default, so the run file sets them all
            plain = {}
        keys = sorted(key for key, value in section.options.items() if key not in plain or plain[key] != value)
        fields = [f"{kind}.{key}" for key in keys]
        if kind == "rollout" and section.use != default.use:
            fields.insert(0, "rollout.use")
        if fields:
            problems.append(f"{', '.join(fields)}: set, but this run samples nothing, so nothing reads it. Remove it.")
    return problems
