"""Finds the options that a name stands for in a run, and when each may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf.errors import ConfigError, did_you_mean
from rlhf.plugins import Plugins
from rlhf_runtime.checkpoint.compare import at_resume, layout_of
from rlhf_runtime.config.command_line import SHORT_FLAGS
from rlhf_runtime.config.components import chosen_by
from rlhf_runtime.config.options import Option, Section, plugin_options, run_file_options, sections
from rlhf_runtime.config.runfile import LISTS, SINGLE, RunFile
from rlhf_runtime.config.suggestions import Suggestions

from rlhf_cli.main import plugin_names

UNNAMED = "none"
"""``algorithm.use`` if no algorithm was named. Its options are then unknown."""


@dataclass(frozen=True)
class Explained:
    """An option of a run."""

    option: Option
    resume: str
    """Reaction of a resume to a different value: ``ignore``, ``report``, ``moved`` or ``refuse``."""
    live: bool
    """Whether an observer may change it while the run trains."""
    names: Sequence[str] = ()
    """Installed plugins that it may name."""


@dataclass(frozen=True)
class Explanation:
    """The options that a name means, and the lines above them."""

    head: Sequence[str]
    """Lines about the section; empty if the name is not a section."""
    options: Sequence[Explained]
    single: bool
    """Whether the name is a single option."""


def explained(name: str, run: RunFile, plugins: Plugins) -> Explanation:
    """The options that a name stands for.

    Args:
        name: a section (``trainer``), a table in it (``algorithm.loss``), an option (``trainer.lr``) or a short flag
            without dashes (``model``).

    Raises ConfigError if nothing has this name, PluginError if a plugin that the section selects cannot be imported.
    """
    tables = {section.path: section for section in sections()}
    full_name = _unnumbered(name if name in tables else SHORT_FLAGS.get(name, name), run)
    place = full_name.partition(".")[0]
    choices = [c for c in chosen_by(run) if c[2].use != UNNAMED]
    selected = [c for c in choices if c[0] == c[1].partition(".")[0] == place]
    options = [o for o in run_file_options() if o.path.partition(".")[0] == place]
    for kind, path, choice in selected:
        options += plugin_options(plugins, kind, path, choice)
    paths = [(o, _unnumbered(o.path, run)) for o in options]
    matches = [o for o, path in paths if f"{path}.".startswith(f"{full_name}.")]
    if not matches:
        names = [path.rpartition(".")[2] for _, path in paths]
        raise ConfigError(_unknown(full_name, tables, names, Suggestions(plugins, choices), bool(selected)))
    trainer = plugins.resolve("trainer", run.trainer.use).cls if place == "trainer" else None
    live = {f"trainer.{option}" for option in trainer.changeable} if trainer else set()
    used = {path: plugins.resolve(kind, choice.use) for kind, path, choice in selected}
    layout = [pattern for path, plugin in used.items() for pattern in layout_of(path, plugin.cls.layout)]
    return Explanation(
        _head(tables[full_name], [str(plugin) for plugin in used.values()], plugins) if full_name in tables else (),
        [
            Explained(
                o, at_resume(_saved_name(o), layout), o.path in live, plugin_names(plugins, o.kind) if o.kind else ()
            )
            for o in matches
        ],
        len(matches) == 1 and _unnumbered(matches[0].path, run) == full_name,
    )


def _unnumbered(path: str, run: RunFile) -> str:
    """A dotted name without the numbers and names of entries: ``reward.0.weight`` and ``reward.math.weight`` are
    ``reward.weight``."""
    first, *rest = path.split(".")
    labels = {choice.label for choice in (*run.reward, *run.observer)}
    labels |= {source.label for source in (*run.data.train, *run.data.eval)}
    fields = {section.path: section.config.model_fields for section in sections()}.get(first, {})
    has_entry_name = first in ("placement", "roles") and rest and rest[0] not in fields
    rest = rest[1:] if has_entry_name else rest
    return ".".join([first, *(part for part in rest if not part.isdigit() and (part in fields or part not in labels))])


def _saved_name(option: Option) -> str:
    """The name in the resolved run file, which lists the options of a plugin separately."""
    parts = option.path.split(".")
    if option.plugin:
        parts.insert(2 if parts[0] in LISTS else 1, "options")
    return ".".join(parts)


def _head(section: Section, used: Sequence[str], plugins: Plugins) -> list[str]:
    lines = [f"{section.heading}  {section.doc}"]
    if section.path in SINGLE or section.path in LISTS:
        names = ", ".join(plugin_names(plugins, section.path)) or "none"
        lines += [f"the options below belong to {plugin}" for plugin in used]
        lines.append(f"installed: {names}; `rlhf explain {section.path} --{section.path} NAME` explains one")
    return lines


def _unknown(
    full_name: str, tables: dict[str, Section], names: Sequence[str], suggestions: Suggestions, selected: bool
) -> str:
    place, _, option = full_name.partition(".")
    if place not in tables:
        hint = did_you_mean(full_name, tables) or suggestions.suggest(full_name, (), flag=False)
        return f"no section or option {full_name!r}.{hint} `rlhf explain` lists the sections."
    if (place in SINGLE or place in LISTS) and not selected:
        return (
            f"[{place}] has no option {option!r} of its own, and no plugin of kind {place} is chosen. Choose one with "
            f"--{place} NAME; `rlhf explain {place}` lists the installed ones."
        )
    hint = suggestions.suggest(full_name, names, flag=False)
    return f"[{place}] has no option {option!r}.{hint} `rlhf explain {place}` lists its options."
