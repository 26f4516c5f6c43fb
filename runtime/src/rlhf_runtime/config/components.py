"""From a section of the run file to a configured component: resolve the plugin, check its options, build it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.errors import ConfigError, PluginError, PluginNotFound
from rlhf.interfaces import Algorithm
from rlhf.plugins import Plugins, Resolved
from rlhf.types import RunOptions

from rlhf_runtime.config.algorithm_selection import select_algorithm
from rlhf_runtime.config.plugin_selection import Selection, dumped, options_config, refuse
from rlhf_runtime.config.runfile import LISTS, SINGLE, RunFile
from rlhf_runtime.config.sections import Choice
from rlhf_runtime.config.suggestions import ROLES, Chosen, Suggestions
from rlhf_runtime.config.validation import check

__all__ = ["Selection", "build", "build_algorithm", "check", "component_config", "resolved_run", "select"]


def component_config(
    resolved: Resolved,
    options: Mapping[str, Any],
    where: str,
    origins: Mapping[str, str] | None = None,
    suggestions: Suggestions | None = None,
) -> Any:
    """The plugin's Config from the options of its section.

    Strict: numbers and text are not converted into each other. Lists become tuples, and flags are read as the field's
    type.

    Args:
        where: dotted path of the section, e.g. ``"reward.0"``.
        origins: :attr:`rlhf_runtime.config.runfile.RunFile.origins`, for file and line in messages.
        suggestions: similar names, for options that the section does not have.

    Raises ConfigError naming the plugin, its distribution and version, and every problem.
    """
    kind = where.partition(".")[0]
    section = {**SINGLE, **LISTS}.get(kind)  # fields such as `weight` of a reward are beside the plugin's own options
    beside = [name for name in section.model_fields if name not in ("use", "options")] if section is not None else []
    config, problems = options_config(
        resolved, options, where, origins or {}, dict.fromkeys(beside), suggestions=suggestions
    )
    if config is None:
        refuse([(resolved, problems)])
    return config


def select(
    plugins: Plugins,
    kind: str,
    choice: Choice,
    where: str | None = None,
    origins: Mapping[str, str] | None = None,
    suggestions: Suggestions | None = None,
) -> Selection:
    """Resolve a section's plugin and check its options."""
    resolved = plugins.resolve(kind, choice.use)
    return Selection(resolved, component_config(resolved, choice.options, where or kind, origins, suggestions))


def build(
    plugins: Plugins,
    kind: str,
    choice: Choice,
    *args: Any,
    where: str | None = None,
    origins: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> tuple[Any, Resolved]:
    """The component ``cls(config, *args, **kwargs)`` and its resolved plugin."""
    selection = select(plugins, kind, choice, where, origins)
    return selection.build(*args, **kwargs), selection.resolved


def build_algorithm(
    plugins: Plugins, choice: Choice, origins: Mapping[str, str] | None = None, run: RunOptions | None = None
) -> tuple[Algorithm, list[Resolved]]:
    """The algorithm with a component in each of its slots, and the plugins: the algorithm first, then the slots, then
    the members.

    ``[algorithm.<slot>] use = "..."`` replaces a slot's plugin and with it the algorithm's defaults for that slot.
    Raises ConfigError with the problems of the algorithm and all slots at once.
    """
    selected = select_algorithm(plugins, choice, origins or {})
    return selected.build(run), selected.plugins()


def option_problems(plugins: Plugins, choices: Chosen, origins: Mapping[str, str]) -> list[str]:
    """Problems of the options of all these plugins, one text per plugin. If there are any, plugins that are not
    installed are listed too."""
    suggestions = Suggestions(plugins, choices)
    problems, missing = [], []
    for kind, where, choice in choices:
        try:
            if where == "algorithm":
                select_algorithm(plugins, choice, origins, suggestions)
            else:
                select(plugins, kind, choice, where, origins, suggestions)
        except ConfigError as error:
            problems.append(str(error))
        except PluginNotFound as error:
            missing.append(str(error))
        except PluginError:
            continue  # raised when the plugin is built
    return problems + missing if problems else []


def chosen_by(run: RunFile) -> Chosen:
    """The plugins that a run file selects, each with its section."""
    choices = [(kind, kind, choice) for kind in SINGLE if (choice := getattr(run, kind)) is not None]
    for kind in LISTS:
        choices += [(kind, f"{kind}.{n}", choice) for n, choice in enumerate(getattr(run, kind))]
    roles = {**{n: (n, getattr(run, n)) for n in ROLES}, **{n: (f"roles.{n}", s) for n, s in run.roles.items()}}
    for where, section in roles.values():
        if section.trainer:
            choices.append(("trainer", f"{where}.trainer", Choice(use=run.trainer.use, options=section.trainer)))
    return choices


def resolved_run(plugins: Plugins, run: RunFile) -> RunFile:
    """The run file with every option of every selected plugin filled in. A run writes it to ``config.toml``.

    Loading it again selects and configures the same plugins, even if a plugin's defaults change later.
    Raises ConfigError with the problems of the options of all plugins.
    """
    origins = run.origins
    if problems := option_problems(plugins, chosen_by(run), origins):
        raise ConfigError("\n".join(problems))
    selected = select_algorithm(plugins, run.algorithm, origins)
    changed: dict[str, Any] = {"algorithm": run.algorithm.model_copy(update={"options": selected.options()})}
    for kind in SINGLE:
        section: Choice | None = getattr(run, kind)
        unused = kind in ("rollout", "generator") and selected.own.resolved.cls.data != "prompts"
        if section is None or kind == "algorithm" or (unused and section == RunFile.model_fields[kind].default):
            continue
        changed[kind] = _filled(plugins, kind, section, kind, origins)
    for kind in LISTS:
        sections: tuple[Choice, ...] = getattr(run, kind)
        changed[kind] = tuple(_filled(plugins, kind, s, f"{kind}.{i}", origins) for i, s in enumerate(sections))
    trainer = plugins.resolve("trainer", run.trainer.use)
    for name, role in {**{n: getattr(run, n) for n in ("policy", "critic", "reference")}, **run.roles}.items():
        if role.trainer:
            where = f"{name}.trainer" if name not in run.roles else f"roles.{name}.trainer"
            merged = component_config(trainer, {**run.trainer.options, **role.trainer}, where, origins)
            role = role.model_copy(update={"trainer": {k: v for k, v in dumped(merged).items() if k in role.trainer}})
        if name in run.roles:
            changed.setdefault("roles", dict(run.roles))[name] = role
        else:
            changed[name] = role
    return run.model_copy(update=changed)


# --------------------------------------------------------------------------------------------- inside


def _filled(plugins: Plugins, kind: str, section: Choice, where: str, origins: Mapping[str, str]) -> Choice:
    selection = select(plugins, kind, section, where, origins)
    return section.model_copy(update={"options": dumped(selection.config)})
