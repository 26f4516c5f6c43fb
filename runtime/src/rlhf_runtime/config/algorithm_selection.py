"""The algorithm of a run file: its options, the plugins in its slots, and its members."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf.errors import ConfigError, PluginError, PluginInvalid
from rlhf.interfaces import Algorithm, Component, Slot
from rlhf.plugins import Plugins, Resolved
from rlhf.types import RunOptions

from rlhf_runtime.config.flag_values import item_of, model_of, plain
from rlhf_runtime.config.plugin_selection import Selection, dumped, options_config, refusal_lines
from rlhf_runtime.config.problems import origin, type_and_value
from rlhf_runtime.config.sections import Choice
from rlhf_runtime.config.suggestions import Suggestions


@dataclass(frozen=True, slots=True)
class AlgorithmSelection:
    """An algorithm with the plugins in its slots, and its members (``Algorithm.has_members``), each with its own."""

    own: Selection
    slots: Mapping[str, Selection]
    members: Mapping[str, AlgorithmSelection]

    def build(self, run: RunOptions | None) -> Algorithm:
        """The algorithm with a component in each slot. Problems of a member are reported with the path of its table."""
        parts: dict[str, Component] = {name: selection.build() for name, selection in self.slots.items()}
        for name, member in self.members.items():
            try:
                parts[f"members.{name}"] = member.build(run)
            except ConfigError as error:
                inside = re.sub(r"\balgorithm\.(?=\w)", f"algorithm.members.{name}.", str(error))
                raise ConfigError(f"member {name!r}: {inside}") from None
        algorithm: Algorithm = self.own.build(parts, run)
        return algorithm

    def plugins(self) -> list[Resolved]:
        """The algorithm, its slots, then its members with theirs."""
        members = [resolved for member in self.members.values() for resolved in member.plugins()]
        return [self.own.resolved, *(s.resolved for s in self.slots.values()), *members]

    def options(self) -> dict[str, Any]:
        """The options of the section, every one filled in."""
        options = dumped(self.own.config)
        for name, selection in self.slots.items():
            options[name] = {"use": selection.resolved.ref, **dumped(selection.config)}
        for name, member in self.members.items():
            own = {**options["members"][name], "use": member.own.resolved.ref}
            options["members"] = {**options["members"], name: {**own, **member.options()}}
        return options


def select_algorithm(
    plugins: Plugins,
    choice: Choice,
    origins: Mapping[str, str],
    suggestions: Suggestions | None = None,
    where: str = "algorithm",
) -> AlgorithmSelection:
    """Raises ConfigError with the problems of the algorithm, its slots and its members."""
    resolved = plugins.resolve("algorithm", choice.use)
    declared: Mapping[str, Slot] = resolved.cls.slots
    own = {k: v for k, v in choice.options.items() if k not in declared}
    slots: dict[str, Selection] = {}
    refusals: list[tuple[Resolved, list[str]]] = []
    fields: dict[str, str] = {}
    for name, slot in declared.items():
        part, options = _slot(plugins, slot, choice.options.get(name, {}), f"{where}.{name}", origins)
        fields |= dict.fromkeys(part.cls.Config.model_fields, name)
        config, problems = options_config(part, options, f"{where}.{name}", origins, suggestions=suggestions)
        if config is None:
            refusals.append((part, problems))
        else:
            slots[name] = Selection(part, config)
    members, refused = {}, []
    if resolved.cls.has_members and "members" in own:
        own["members"], choices = _members(resolved, own["members"])
        for name, member in choices.items():
            try:
                members[name] = select_algorithm(plugins, member, origins, suggestions, f"{where}.members.{name}")
            except ConfigError as error:
                refused.append(str(error))
    config, problems = options_config(resolved, own, where, origins, declared, fields, suggestions)
    if config is None:
        refusals.insert(0, (resolved, problems))
    if config is None or refusals or refused:
        raise ConfigError("\n".join([*refusal_lines(refusals), *refused]))
    return AlgorithmSelection(Selection(resolved, config), slots, members)


def _members(resolved: Resolved, members: Any) -> tuple[Any, dict[str, Choice]]:
    """The table ``members`` of an algorithm: ({name: the fields that the algorithm itself reads}, {name: the member's
    algorithm and its options}). What is not a table, or names no algorithm, is left to the algorithm's ``Config``."""
    field = resolved.cls.Config.model_fields.get("members")
    model = None if field is None or (item := item_of(field.annotation)) is None else model_of(item[1])
    if model is None:
        raise PluginInvalid(
            f"{resolved} has members, so its Config needs a field `members: Mapping[str, M]` with a ComponentConfig M"
        )
    if not isinstance(members, Mapping):
        return members, {}
    own: dict[str, Any] = {}
    choices: dict[str, Choice] = {}
    for name, table in members.items():
        use = table.get("use") if isinstance(table, Mapping) else None
        if not isinstance(use, str):
            own[name] = table
            continue
        own[name] = {k: v for k, v in table.items() if k in model.model_fields}
        options = {k: v for k, v in table.items() if k not in model.model_fields}
        choices[name] = Choice(use=str(use), options=options)
    return own, choices


def _slot(
    plugins: Plugins, slot: Slot, setting: Any, where: str, origins: Mapping[str, str]
) -> tuple[Resolved, dict[str, Any]]:
    """The plugin of a slot and its options, with the algorithm's defaults if they apply."""
    if isinstance(setting, str):
        setting = {"use": str(setting)}
    if not isinstance(setting, Mapping):
        raise ConfigError(
            f"{where}{origin(where, origins)}: a slot is a table or the name of a plugin of kind {slot.kind!r}, got "
            f'{type_and_value(plain(setting))}. Write `[{where}] use = "{slot.use}"`.'
        )
    options = {k: v for k, v in setting.items() if k != "use"}
    use = setting.get("use", slot.use)
    if not isinstance(use, str):
        raise ConfigError(
            f"{where}.use{origin(f'{where}.use', origins)}: the name of a plugin, got {type_and_value(use)}"
        )
    resolved = plugins.resolve(slot.kind, str(use))
    if _same(plugins, slot, resolved):
        options = {**slot.defaults, **options}
    return resolved, options


def _same(plugins: Plugins, slot: Slot, plugin: Resolved) -> bool:
    if plugin.ref.removeprefix("plugin:") == slot.use:
        return True
    try:
        return bool(plugins.resolve(slot.kind, slot.use).cls is plugin.cls)
    except PluginError:  # the default is not installed or ambiguous, so it was not chosen
        return False
