"""Makes components from sections of the run file: resolves the plugin, checks its options, builds it.

An algorithm is built with the plugins in its slots, and with its members.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined, to_jsonable_python
from rlhf.errors import ConfigError, PluginError, PluginInvalid, PluginNotFound, boundary
from rlhf.interfaces import Algorithm, Component, ComponentConfig, Slot
from rlhf.plugins import Plugins, Resolved
from rlhf.types import RunOptions

from rlhf_runtime.config.flag_values import FlagText, item_of, model_of, plain, read
from rlhf_runtime.config.problems import describe, origin, type_and_value, unknown_keys
from rlhf_runtime.config.runfile import LISTS, SINGLE, RunFile
from rlhf_runtime.config.sections import Choice, ModelSection
from rlhf_runtime.config.suggestions import Chosen, Suggestions


def component_config(
    resolved: Resolved,
    options: Mapping[str, Any],
    path: str,
    origins: Mapping[str, str] | None = None,
    suggestions: Suggestions | None = None,
) -> Any:
    """The plugin's Config from the options of its section.

    Strict: numbers and text are not converted into each other. Lists become tuples, and flags are read as the field's
    type.

    Args:
        path: dotted path of the section, e.g. ``"reward.0"``.
        origins: :attr:`rlhf_runtime.config.runfile.RunFile.origins`, for file and line in messages.
        suggestions: similar names, for options that the section does not have.

    Raises ConfigError naming the plugin, its distribution and version, and every problem.
    """
    kind = path.partition(".")[0]
    section = {**SINGLE, **LISTS}.get(kind)  # fields such as `weight` of a reward are next to the plugin's own options
    fields = [name for name in section.model_fields if name not in ("use", "options")] if section is not None else []
    config, problems = options_config(
        resolved, options, path, origins or {}, dict.fromkeys(fields), suggestions=suggestions
    )
    if config is None:
        raise ConfigError("\n".join(refusal_lines([(resolved, problems)])))
    return config


def select(
    plugins: Plugins,
    kind: str,
    choice: Choice,
    path: str | None = None,
    origins: Mapping[str, str] | None = None,
    suggestions: Suggestions | None = None,
) -> Selection:
    """Resolve a section's plugin and check its options."""
    resolved = plugins.resolve(kind, choice.use)
    return Selection(resolved, component_config(resolved, choice.options, path or kind, origins, suggestions))


def build_algorithm(
    plugins: Plugins, choice: Choice, origins: Mapping[str, str] | None = None, run: RunOptions | None = None
) -> Algorithm:
    """The algorithm with a component in each of its slots.

    ``[algorithm.<slot>] use = "..."`` replaces a slot's plugin and with it the algorithm's defaults for that slot.
    Raises ConfigError with the problems of the algorithm and all slots at once.
    """
    return select_algorithm(plugins, choice, origins or {}).build(run)


def option_problems(plugins: Plugins, choices: Chosen, origins: Mapping[str, str]) -> list[str]:
    """Problems of the options of all these plugins, one text per plugin. If there are any, plugins that are not
    installed are listed too."""
    return _select_each(plugins, choices, origins)[1]


def _select_each(
    plugins: Plugins, choices: Chosen, origins: Mapping[str, str]
) -> tuple[dict[str, Selection | AlgorithmSelection | PluginError], list[str]]:
    """({section: its plugin, or the error of resolving it}, :func:`option_problems`).

    The trainer options of a role are checked together with the options of ``[trainer]``, unless the latter have
    problems.
    """
    suggestions = Suggestions(plugins, choices)
    selected: dict[str, Selection | AlgorithmSelection | PluginError] = {}
    problems, missing, shared = [], [], dict[str, Any]()
    for kind, path, choice in choices:
        if kind == "trainer":
            choice = Choice(use=choice.use, options={**shared, **choice.options})
        try:
            if path == "algorithm":
                selected[path] = select_algorithm(plugins, choice, origins, suggestions)
            else:
                selected[path] = select(plugins, kind, choice, path, origins, suggestions)
        except ConfigError as error:
            problems.append(str(error))
        except PluginError as error:
            # Selections raises it when the run uses the section.
            selected[path] = error
            missing += [str(error)] if isinstance(error, PluginNotFound) else []
        else:
            shared = dict(choice.options) if path == "trainer" else shared
    return selected, problems + missing if problems else []


def chosen_by(run: RunFile) -> Chosen:
    """The plugins that a run file selects, each with its section."""
    choices = [(kind, kind, choice) for kind in SINGLE if (choice := getattr(run, kind)) is not None]
    for kind in LISTS:
        choices += [(kind, f"{kind}.{n}", choice) for n, choice in enumerate(getattr(run, kind))]
    for path, _, section in _role_trainers(run):
        choices.append(("trainer", path, Choice(use=run.trainer.use, options=section.trainer)))
    return choices


def _role_trainers(run: RunFile) -> list[tuple[str, str, ModelSection]]:
    """(section, role, the role's section) of every role with its own trainer options."""
    return [
        (f"{path}.trainer", path.removeprefix("roles."), section)
        for path, section in run.models.items()
        if section.trainer and path not in run.roles
    ]


@dataclass(frozen=True, slots=True)
class AlgorithmSelection:
    """An algorithm with the plugins in its slots, and its members (``Algorithm.has_members``) with the plugins in their
    slots."""

    algorithm: Selection
    slots: Mapping[str, Selection]
    members: Mapping[str, AlgorithmSelection]

    def build(self, run: RunOptions | None) -> Algorithm:
        """The algorithm with a component in each slot. Problems of a member are reported with the path of its table."""
        parts: dict[str, Component] = {name: selection.build() for name, selection in self.slots.items()}
        for name, member in self.members.items():
            try:
                parts[f"members.{name}"] = member.build(run)
            except ConfigError as error:
                message = re.sub(r"\balgorithm\.(?=\w)", f"algorithm.members.{name}.", str(error))
                raise ConfigError(f"member {name!r}: {message}") from None
        algorithm: Algorithm = self.algorithm.build(parts, run)
        return algorithm

    def plugins(self) -> list[Resolved]:
        """The plugins of the algorithm, of its slots, then of its members and their slots."""
        members = [resolved for member in self.members.values() for resolved in member.plugins()]
        return [self.algorithm.resolved, *(s.resolved for s in self.slots.values()), *members]

    def options(self) -> dict[str, Any]:
        """The options of the section, including defaults."""
        options = dumped(self.algorithm.config)
        for name, selection in self.slots.items():
            options[name] = {"use": selection.resolved.ref, **dumped(selection.config)}
        for name, member in self.members.items():
            fields = {**options["members"][name], "use": member.algorithm.resolved.ref}
            options["members"] = {**options["members"], name: {**fields, **member.options()}}
        return options

    def defaults(self) -> dict[str, Any]:
        """The defaults of :meth:`options`."""
        defaults = _defaults(self.algorithm.config, NO_DEFAULT)
        for name, part in self.slots.items():
            slot = self.algorithm.resolved.cls.slots[name]
            of_slot = slot.defaults if part.resolved.ref.removeprefix("plugin:") == slot.use else {}
            defaults[name] = {"use": slot.use, **_defaults(part.config, NO_DEFAULT), **of_slot}
        for name, member in self.members.items():
            defaults["members"][name] |= member.defaults()
        return defaults


def select_algorithm(
    plugins: Plugins,
    choice: Choice,
    origins: Mapping[str, str],
    suggestions: Suggestions | None = None,
    path: str = "algorithm",
) -> AlgorithmSelection:
    """Raises ConfigError with the problems of the algorithm, its slots and its members."""
    resolved = plugins.resolve("algorithm", choice.use)
    declared: Mapping[str, Slot] = resolved.cls.slots
    algorithm_options = {k: v for k, v in choice.options.items() if k not in declared}
    slots: dict[str, Selection] = {}
    refusals: list[tuple[Resolved, list[str]]] = []
    fields: dict[str, str] = {}
    for name, slot in declared.items():
        part, options = _slot(plugins, slot, choice.options.get(name, {}), f"{path}.{name}", origins)
        fields |= dict.fromkeys(part.cls.Config.model_fields, name)
        config, problems = options_config(part, options, f"{path}.{name}", origins, suggestions=suggestions)
        if config is None:
            refusals.append((part, problems))
        else:
            slots[name] = Selection(part, config)
    members, refused = {}, []
    if resolved.cls.has_members and "members" in algorithm_options:
        algorithm_options["members"], choices = _members(resolved, algorithm_options["members"])
        for name, member in choices.items():
            try:
                members[name] = select_algorithm(plugins, member, origins, suggestions, f"{path}.members.{name}")
            except ConfigError as error:
                refused.append(str(error))
    config, problems = options_config(resolved, algorithm_options, path, origins, declared, fields, suggestions)
    if config is None:
        refusals.insert(0, (resolved, problems))
    if config is None or refusals or refused:
        raise ConfigError("\n".join([*refusal_lines(refusals), *refused]))
    return AlgorithmSelection(Selection(resolved, config), slots, members)


def _members(resolved: Resolved, members: Any) -> tuple[Any, dict[str, Choice]]:
    """The table ``members`` of an algorithm: ({name: the fields that the algorithm itself reads}, {name: the member's
    algorithm and its options}). Values that are not tables, or that name no algorithm, are left to the algorithm's
    ``Config``."""
    field = resolved.cls.Config.model_fields.get("members")
    model = None if field is None or (item := item_of(field.annotation)) is None else model_of(item[1])
    if model is None:
        raise PluginInvalid(
            f"{resolved} has members, so its Config needs a field `members: Mapping[str, M]` with a ComponentConfig M"
        )
    if not isinstance(members, Mapping):
        return members, {}
    member_fields: dict[str, Any] = {}
    choices: dict[str, Choice] = {}
    for name, table in members.items():
        use = table.get("use") if isinstance(table, Mapping) else None
        if not isinstance(use, str):
            member_fields[name] = table
            continue
        member_fields[name] = {k: v for k, v in table.items() if k in model.model_fields}
        options = {k: v for k, v in table.items() if k not in model.model_fields}
        choices[name] = Choice(use=str(use), options=options)
    return member_fields, choices


def _slot(
    plugins: Plugins, slot: Slot, setting: Any, path: str, origins: Mapping[str, str]
) -> tuple[Resolved, dict[str, Any]]:
    """The plugin of a slot and its options, with the algorithm's defaults if they apply."""
    if isinstance(setting, str):
        setting = {"use": str(setting)}
    if not isinstance(setting, Mapping):
        raise ConfigError(
            f"{path}{origin(path, origins)}: a slot is a table or the name of a plugin of kind {slot.kind!r}, got "
            f'{type_and_value(plain(setting))}. Write `[{path}] use = "{slot.use}"`.'
        )
    options = {k: v for k, v in setting.items() if k != "use"}
    use = setting.get("use", slot.use)
    if not isinstance(use, str):
        raise ConfigError(
            f"{path}.use{origin(f'{path}.use', origins)}: expected the name of a plugin, got {type_and_value(use)}"
        )
    try:
        resolved = plugins.resolve(slot.kind, str(use))
    except PluginNotFound as error:
        if "use" in setting:
            raise
        raise PluginNotFound(
            f"{error} The algorithm uses this plugin for the slot if {path}.use is not set. Set that option to another "
            "plugin, or to a class in a file: file:PATH.py:CLASS."
        ) from None
    try:
        default = plugins.resolve(slot.kind, slot.use).cls
    except PluginError:  # it is not installed or ambiguous, so it was not chosen
        return resolved, options
    if resolved.cls is default:
        return resolved, {**slot.defaults, **options}
    if slot.kind == "loss" and None not in (resolved.cls.data, default.data) and resolved.cls.data != default.data:
        raise ConfigError(
            f"{path}.use{origin(f'{path}.use', origins)}: the loss {resolved.name!r} is for {resolved.cls.data}, but "
            f"this slot needs a loss for {default.data}, such as {slot.use!r}. Use such a loss, or another algorithm."
        )
    return resolved, options


@dataclass(frozen=True, slots=True)
class Selection:
    """A resolved plugin with its checked config; picklable, so that workers can build it again."""

    resolved: Resolved
    config: ComponentConfig

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """``cls(config, *args, **kwargs)``. Errors of the constructor are attributed to the plugin."""
        with boundary(PluginError, f"building {self.resolved}"):
            return self.resolved.cls(self.config, *args, **kwargs)


@dataclass(frozen=True)
class Selections:
    """Plugins that a run file selects, with their options. The options of each plugin are validated once, here."""

    config: RunFile
    """The run file with every option of every selected plugin filled in. A run writes it to ``config.toml``; loading it
    again selects and configures the same plugins, even if a plugin's defaults change later."""
    _of_sections: Mapping[str, Selection | AlgorithmSelection | PluginError]

    @classmethod
    def of(
        cls,
        plugins: Plugins,
        run: RunFile,
        kinds: Collection[str] = (*SINGLE, *LISTS),
        roles: Collection[str] | None = None,
    ) -> Selections:
        """
        Args:
            kinds: kinds of plugins to select.
            roles: roles whose own trainers are selected; None: all roles.

        Raises ConfigError with the problems of the options of all plugins; PluginError if one cannot be resolved,
        unless it is the default of a section that the algorithm does not use.
        """
        other_trainers = {path for path, name, _ in _role_trainers(run) if roles is not None and name not in roles}
        choices = [choice for choice in chosen_by(run) if choice[0] in kinds and choice[1] not in other_trainers]
        selected, problems = _select_each(plugins, choices, run.origins)
        if problems:
            raise ConfigError("\n".join(problems))
        return cls(run.model_copy(update=cls(run, selected)._filled()), selected)

    @property
    def algorithm(self) -> AlgorithmSelection:
        selected = self._selected("algorithm")
        assert isinstance(selected, AlgorithmSelection)
        return selected

    def __contains__(self, section: str) -> bool:
        return section in self._of_sections

    def __getitem__(self, section: str) -> Selection:
        """The plugin of a section: ``trainer``, ``reward.0``, ``critic.trainer``, ``roles.NAME.trainer``."""
        selected = self._selected(section)
        assert isinstance(selected, Selection)
        return selected

    def _selected(self, section: str) -> Selection | AlgorithmSelection:
        selected = self._of_sections[section]
        if isinstance(selected, PluginError):
            raise selected
        return selected

    def user_options(self) -> list[str]:
        """Dotted paths of the options that the user set to a value other than the default. The default is set by the
        class of the section or plugin, by the algorithm for its slot, or by ``[trainer]`` for a role's own trainer.
        Options without a default are included."""
        tree = _defaults(self.config, None)
        for section_path, selection in self._of_sections.items():
            section = tree
            *parents, last = section_path.split(".")
            for part in parents:
                section = section[part]
            if isinstance(selection, AlgorithmSelection):
                section[last] |= selection.defaults()
            elif isinstance(selection, Selection) and last == "trainer" and parents:
                section[last] = dumped(self["trainer"].config)
            elif isinstance(selection, Selection):
                section[last] |= _defaults(selection.config, NO_DEFAULT)
        paths = []
        for path in self.config.origins.options:
            value, default = self.config.value(path), tree
            if isinstance(value, Mapping) and "use" in value:  # the short form of a part, `loss = "NAME"`
                path, value = f"{path}.use", value["use"]
            for part in path.split("."):
                default = _child_default(default, part)
            if path.endswith(".use"):
                value = str(value).removeprefix("plugin:")
            if default is NO_DEFAULT or to_jsonable_python(value) != to_jsonable_python(default):
                paths.append(path)
        return paths

    def _filled(self) -> dict[str, Any]:
        """The sections that hold options of the selected plugins, filled in."""
        run = self.config
        sections: dict[str, Any] = {"roles": dict(run.roles)}
        offline = False
        if "algorithm" in self:
            sections["algorithm"] = run.algorithm.model_copy(update={"options": self.algorithm.options()})
            offline = self.algorithm.algorithm.resolved.cls.data != "prompts"
        for kind in SINGLE:
            section: Choice | None = getattr(run, kind)
            # The defaults of sections that the run does not use may not be installed.
            unused = offline and kind in ("rollout", "generator") and section == RunFile.model_fields[kind].default
            if kind in self and section is not None and kind != "algorithm" and not unused:
                sections[kind] = section.model_copy(update={"options": dumped(self[kind].config)})
        for kind in LISTS:
            sections[kind] = tuple(
                choice.model_copy(update={"options": dumped(self[path].config)})
                if (path := f"{kind}.{number}") in self
                else choice
                for number, choice in enumerate(getattr(run, kind))
            )
        for path, name, role in _role_trainers(run):
            if path not in self:
                continue
            # A role's section has only the options in which it differs from [trainer].
            options = {k: v for k, v in dumped(self[path].config).items() if k in role.trainer}
            target = sections["roles"] if path.startswith("roles.") else sections
            target[name] = role.model_copy(update={"trainer": options})
        return sections


def options_config(
    resolved: Resolved,
    options: Mapping[str, Any],
    prefix: str,
    origins: Mapping[str, str],
    extra: Mapping[str, Any] | None = None,
    slot_fields: Mapping[str, str] | None = None,
    suggestions: Suggestions | None = None,
) -> tuple[ComponentConfig | None, list[str]]:
    """The config, or None and the problems. ``extra``: further keys that the section may have. ``slot_fields``: {field:
    slot} for fields that belong in a slot's section."""
    problems = []
    model = resolved.cls.Config
    merged = dict(resolved.options)
    for key, value in options.items():
        if key in merged and plain(value) != merged[key]:
            problems.append(
                f"{prefix}.{key}{origin(f'{prefix}.{key}', origins)}: {type_and_value(plain(value))}, but the "
                f"reference {resolved.ref!r} already sets it to {merged[key]!r}. Keep one of them."
            )
        merged[key] = value
    for key in [k for k in merged if k not in model.model_fields]:
        path = f"{prefix}.{key}"
        value = merged.pop(key)
        if slot_fields and key in slot_fields:
            problems.append(
                f"{path}{origin(path, origins)}: belongs to {prefix}.{slot_fields[key]}; write "
                f"--{prefix}.{slot_fields[key]}.{key} {value if isinstance(value, FlagText) else plain(value)}."
            )
        else:
            allowed = [*model.model_fields, *(extra or ())]
            problems += unknown_keys(path, value, allowed, origins, suggestions)
    try:
        config = model.model_validate(read(model, merged))
    except ValidationError as error:
        return None, problems + describe(error, model, prefix, origins, suggestions)
    return (None if problems else config), problems


def refusal_lines(refusals: list[tuple[Resolved, list[str]]]) -> list[str]:
    lines = []
    for resolved, problems in refusals:
        lines += [f"{resolved} cannot be configured like this:", *(f"  {p}" for p in problems)]
    return lines


def dumped(config: ComponentConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_none=True)


NO_DEFAULT = PydanticUndefined
"""Marks that there is no default."""


def _defaults(value: Any, default: Any) -> Any:
    """The default of a value. For tables, the defaults of their options.

    Args:
        default: default of the whole value. None: by default the value is absent, so a table differs from the default
            even if every option has the default of its class.
    """
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        default_model = default if type(default) is type(value) else None
        of_fields = {n: f.get_default(call_default_factory=True) for n, f in fields.items()}
        if default_model is None and default is None and all(getattr(value, n) == d for n, d in of_fields.items()):
            return NO_DEFAULT
        of_fields = of_fields if default_model is None else {n: getattr(default_model, n) for n in fields}
        return {n: _defaults(getattr(value, n), d) for n, d in of_fields.items()}
    if isinstance(value, Mapping):
        return {name: _defaults(v, _child_default(default, name)) for name, v in value.items()}
    if isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
        return {str(number): _defaults(item, NO_DEFAULT) for number, item in enumerate(value)}
    return default


def _child_default(values: Any, name: str) -> Any:
    return values.get(name, NO_DEFAULT) if isinstance(values, Mapping) else NO_DEFAULT
