"""Reads text values of the command line as the type of their field.

A flag's text is read as a TOML value if the field's type allows it. It stays text if the field is text:
``--run.seed 3`` is an integer, ``--run.name 3`` is the text "3". ``True`` and ``False`` are booleans too. A flag
without a value is true if the field is a boolean. No other conversion is made. A plugin's option keeps its text as
:class:`FlagText` until the plugin, and so the field's type, is known.
"""

from __future__ import annotations

import enum
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_MISSING = object()

PLUGIN_OPTIONS = "plugin options"
"""Marker in a field's ``Annotated`` metadata: the values belong to a plugin, so their types are not known yet."""


class ValuelessFlag(enum.Enum):
    """:data:`NO_VALUE`: a flag without a value."""

    FLAG = "true"

    def __str__(self) -> str:
        return self.value


NO_VALUE = ValuelessFlag.FLAG
PYTHON_BOOLEANS = {"True": True, "False": False}


class FlagText(str):
    """A flag's raw text, not yet read."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        """The text as a TOML value, or the text itself if it is not one."""
        value = toml_value(self)
        return str(self) if value is _MISSING else value


@dataclass(frozen=True, slots=True)
class PythonValue:
    """A Python value instead of a flag's text. It is not converted."""

    value: Any


def toml_value(text: str) -> Any:
    """``text`` on one line as a TOML value or a Python boolean; a sentinel if it is neither."""
    if text in PYTHON_BOOLEANS:
        return PYTHON_BOOLEANS[text]
    if "\n" in text:
        return _MISSING
    try:
        return tomllib.loads(f"value = {text}\n")["value"]
    except (ValueError, RecursionError):  # also an integer of thousands of digits, and thousands of brackets
        return _MISSING


def plain(value: Any) -> Any:
    """``value`` with every FlagText read without knowing its field."""
    if value is NO_VALUE:
        return True
    if isinstance(value, FlagText):
        return value.value
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def read(annotation: Any, value: Any) -> Any:
    """``value`` (from TOML or flags) in the form that strict validation of ``annotation`` accepts.

    Lists become tuples, and text becomes paths or enumerations, only for types that JSON cannot express. A value of a
    wrong type is otherwise returned unchanged, so that validation reports it.
    """
    model = model_of(annotation)
    if model is not None and isinstance(value, Mapping):
        fields = {n: f.annotation for n, f in model.model_fields.items() if PLUGIN_OPTIONS not in f.metadata}
        return {k: read(fields[k], v) if k in fields else v for k, v in value.items()}
    item = item_of(annotation)
    if item is not None:
        container, inner = item
        if isinstance(value, FlagText) and isinstance(value.value, list | dict):
            value = value.value
        if container is dict and isinstance(value, Mapping):
            return {k: read(inner, v) for k, v in value.items()}
        if container is not dict and isinstance(value, list | tuple):
            return container(read(inner, v) for v in value)
    if annotation is Any:
        return plain(value)
    if value is NO_VALUE:
        return True if bool in _members(annotation) else value
    if isinstance(value, FlagText):
        parsed = toml_value(value)
        for candidate in (parsed, str(value)):
            converted = _strictly(annotation, candidate)
            if converted is not _MISSING:
                return converted
        value = str(value) if parsed is _MISSING else parsed
    else:
        converted = _strictly(annotation, value)
        if converted is not _MISSING:
            return converted
    if isinstance(value, list) and any(typing.get_origin(member) is tuple for member in _members(annotation)):
        return tuple(value)
    return value


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The model that ``Model``, ``Model | None`` or ``Annotated[Model, ...]`` names."""
    for candidate in _members(annotation):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def item_of(annotation: Any) -> tuple[type, Any] | None:
    """(container, item type) of ``tuple[X, ...]``, ``list[X]`` and ``dict[str, X]``."""
    for candidate in _members(annotation):
        origin, arguments = typing.get_origin(candidate), typing.get_args(candidate)
        if origin in (tuple, list) and arguments and (origin is list or arguments[-1] is Ellipsis):
            return origin, arguments[0]
        if origin in (dict, Mapping) and len(arguments) == 2:
            return dict, arguments[1]
    return None


def _members(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [m for a in typing.get_args(annotation) for m in _members(a)]
    return [annotation]


def _strictly(annotation: Any, value: Any) -> Any:
    if value is _MISSING:
        return _MISSING
    # pydantic refuses `config` for a model, which has its own.
    has_own_config = model_of(annotation) is not None
    try:
        adapter = TypeAdapter(annotation) if has_own_config else TypeAdapter(annotation, config=_STRICT)
        return adapter.validate_json(json.dumps(value, allow_nan=False))
    except (ValidationError, TypeError, ValueError):
        return _MISSING
