"""The options of a run as data: name, type, default, allowed values and meaning, read from the classes that check them.

``rlhf explain``, ``rlhf init``, ``rlhf plugins show``, shell completion, suggestions for wrong names and the reference
page of the run file all read options here.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python
from rlhf.errors import PluginError
from rlhf.plugins import Plugins, Resolved

from rlhf_runtime.config.flag_values import PLUGIN_OPTIONS, item_of, model_of
from rlhf_runtime.config.runfile import LISTS, SINGLE, RunFile
from rlhf_runtime.config.sections import Choice

_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): ""}
_BOUNDS = {Gt: (">", "gt"), Ge: (">=", "ge"), Lt: ("<", "lt"), Le: ("<=", "le")}
USE = "A reference to the plugin; its options stand beside it."
CHOSEN_BY_THE_RUN = ("run.output",)
"""Options whose value the run chooses if they are not set. The default in their class is not that value."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option."""

    path: str
    """Its dotted name, as in a flag: ``trainer.lr``, ``data.train.0.path``, ``placement.NAME.ranks``."""
    type: str
    """``integer > 0``, ``"error", "drop"``, ``list of texts``."""
    default: Any
    """A JSON value; None if nothing is set or the option is required."""
    required: bool
    doc: str
    """Its meaning: one paragraph of Markdown."""
    allowed: tuple[str, ...] = ()
    """The allowed values as written in a flag, if they are a fixed set."""
    kind: str = ""
    """The option names a plugin of this kind."""
    plugin: str = ""
    """The plugin that reads it; empty if the run file itself does."""
    table: str = ""
    """Path of the nested table that contains the option, if the table may be absent: ``trainer.lora``. Then the option
    is required, or has its default, only if the table is present."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the run file."""

    path: str
    """``trainer``, ``data.train``."""
    heading: str
    """``[trainer]``, ``[[data.train]]``, ``[placement.NAME]``."""
    config: type[BaseModel]
    """The fields of the table itself."""
    doc: str
    """The meaning of the section, as one paragraph."""

    @property
    def default_plugin(self) -> str:
        """The plugin that is used if the run file does not have the section; empty if there is none."""
        field = RunFile.model_fields.get(self.path)
        return field.default.use if field is not None and isinstance(field.default, Choice) else ""


def sections() -> list[Section]:
    """The sections in the order of the run file. Nested tables follow the table that contains them."""
    entries = []
    for name, field in RunFile.model_fields.items():
        container, config = (item_of(field.annotation) or (None,))[0], _table(field.annotation)
        assert config is not None
        heading = f"[{name}.NAME]" if container is dict else f"[[{name}]]" if container else f"[{name}]"
        entries.append(Section(name, heading, config, _meaning(config, field)))
        for inner, nested in config.model_fields.items():
            model = _table(nested.annotation)
            if model is not None and PLUGIN_OPTIONS not in nested.metadata:
                path = f"{name}.{inner}"
                is_list = item_of(nested.annotation) is not None
                heading = f"[[{path}]]" if is_list else f"[{path}]"
                entries.append(Section(path, heading, model, _meaning(model, nested)))
    return entries


def run_file_options() -> list[Option]:
    """The options of the run file itself, in its order, without options of plugins."""
    defaults = {f"{section.path}.use": section.default_plugin for section in sections() if section.default_plugin}
    return [
        replace(o, default=defaults[o.path], required=False) if o.path in defaults else o for o in options_of(RunFile)
    ]


def options_of(config: type[BaseModel], prefix: str = "", plugin: str = "") -> list[Option]:
    """The options of a class, including the options of nested tables. A nested table that may be absent is also an
    option, of type ``table``.

    Args:
        prefix: prefix of every path, including the last dot.
    """
    options: list[Option] = []
    fields = list(config.model_fields.items())
    if plugin:  # the fields of a class come before inherited fields
        annotations = inspect.get_annotations(config)
        fields.sort(key=lambda pair: pair[0] not in annotations)
    for name, field in fields:
        path, inner = f"{prefix}{name}", _table(field.annotation)
        if name == "options" and PLUGIN_OPTIONS in field.metadata:
            continue
        if inner is None or PLUGIN_OPTIONS in field.metadata:
            options.append(option(path, field, plugin))
            continue
        item = item_of(field.annotation)
        entry = "" if item is None else "NAME." if item[0] is dict else "0."
        nested = options_of(inner, f"{path}.{entry}", plugin)
        if item is not None and item[0] is dict and config is not RunFile:
            nested = [replace(o, table=f"{path}.NAME") for o in nested]
        if item is None and field.default is None and config is not RunFile:
            nested = [option(path, field, plugin), *(replace(o, table=path) for o in nested)]
        options += nested
    return options


def plugin_options(plugins: Plugins, kind: str, path: str, choice: Choice, skip_broken: bool = False) -> list[Option]:
    """The options of the plugin that a section selects, and of the plugins in its slots.

    Args:
        path: dotted path of the section, e.g. ``reward.0``.
        skip_broken: whether to list only ``use`` for a plugin in a slot that cannot be imported.

    Raises PluginError if a plugin cannot be imported.
    """
    resolved: Resolved = plugins.resolve(kind, choice.use)
    options = options_of(resolved.cls.Config, f"{path}.", str(resolved))
    for name, slot in getattr(resolved.cls, "slots", {}).items():
        setting = choice.options.get(name)
        setting = setting.get("use") if isinstance(setting, Mapping) else setting
        use, slot_path = str(setting or slot.use), f"{path}.{name}"
        options.append(Option(f"{slot_path}.use", "text", slot.use, False, USE, kind=slot.kind, plugin=str(resolved)))
        defaults = slot.defaults if use.removeprefix("plugin:") == slot.use else {}
        try:
            of_part = plugin_options(plugins, slot.kind, slot_path, Choice(use=use), skip_broken)
        except PluginError:
            if skip_broken:
                continue
            raise
        for o in of_part:
            is_set = o.path == f"{slot_path}.{o.name}" and o.name in defaults
            options.append(replace(o, default=to_jsonable_python(defaults[o.name]), required=False) if is_set else o)
    return options


def option(path: str, field: FieldInfo, plugin: str = "") -> Option:
    """One field of a section or of a plugin's ``Config``."""
    parts = [part for part in path.split(".") if part != "0"]
    kind = parts[0] if not plugin and len(parts) == 2 and parts[1] == "use" and parts[0] in {**SINGLE, **LISTS} else ""
    default = field.get_default(call_default_factory=True)
    required = default is PydanticUndefined
    return Option(
        path,
        "table" if PLUGIN_OPTIONS in field.metadata else _bounded(_type(field.annotation), field.metadata),
        None if required or path in CHOSEN_BY_THE_RUN else to_jsonable_python(default),
        required,
        one_paragraph(field.description or (USE if kind else "")),
        tuple(_allowed(field.annotation)),
        kind,
        plugin,
    )


def default_text(option: Option) -> str:
    """The default as written in the run file; ``required``, or empty if nothing is set."""
    if option.required:
        return "required"
    value = option.default
    if value is None or value in ([], {}):
        return ""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def one_paragraph(doc: str) -> str:
    """A docstring as one paragraph of Markdown."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(doc.split())).replace("``", "`")


# ---------------------------------------------------------------------------------------------- types


def _meaning(config: type[BaseModel], field: FieldInfo) -> str:
    doc = "" if config is Choice else vars(config).get("__doc__") or ""
    return one_paragraph(doc or field.description or "")


def _table(annotation: Any) -> type[BaseModel] | None:
    """The class of a table, or of the entries of a list or table of tables; None if the field is a value."""
    item = item_of(annotation)
    return model_of(item[1] if item is not None else annotation)


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner, *metadata = arguments
        return _bounded(_type(inner), [m for x in metadata for m in getattr(x, "metadata", [x])])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(part for part in map(_type, arguments) if part)
    if origin is typing.Literal:
        return ", ".join(json.dumps(value) for value in arguments)
    if origin is dict or model_of(annotation) is not None:
        return "table"
    if origin in (tuple, list):
        if Ellipsis not in arguments and origin is tuple:
            return f"list of {len(arguments)}: {', '.join(map(_type, arguments))}"
        inner = _type(arguments[0])
        return (
            f"list of {inner}" if inner.startswith('"') else f"list of {'tables' if inner == 'table' else inner + 's'}"
        )
    if annotation is Any:
        return "any value"
    return _TYPES[annotation] if annotation in _TYPES else getattr(annotation, "__name__", str(annotation))


def _bounded(text: str, metadata: list[Any]) -> str:
    bounds = [
        f"{sign} {getattr(m, key):g}" for m in metadata for kind, (sign, key) in _BOUNDS.items() if type(m) is kind
    ]
    return " ".join([text, ", ".join(bounds)]) if bounds else text


def _allowed(annotation: Any) -> Iterator[str]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        yield from (value if isinstance(value, str) else json.dumps(value) for value in arguments)
    elif origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _allowed(argument)
    elif origin is typing.Annotated:
        yield from _allowed(arguments[0])
    elif annotation is bool:
        yield from ("true", "false")
