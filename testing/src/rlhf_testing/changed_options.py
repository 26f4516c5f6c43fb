"""The options of a config that are not at their defaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def changed_fields(config: BaseModel, path: str = "") -> Iterator[tuple[str, Any, FieldInfo]]:
    """``kl.coef``, its value and its field, for each field of a config, nested ones included, that is not at its
    default."""
    for name, info in type(config).model_fields.items():
        value, default = getattr(config, name), info.get_default(call_default_factory=True)
        if isinstance(value, BaseModel) and type(value) is type(default):
            yield from changed_fields(value, f"{path}{name}.")
        elif value != default:
            yield f"{path}{name}", value, info


def not_default(config: BaseModel) -> list[str]:
    """``kl.coef = 0.1`` for each field of a config that is not at its default."""
    return [f"{path} = {value!r}" for path, value, _ in changed_fields(config)]


def set_options(config: BaseModel) -> list[str]:
    """``kl.coef`` for each option of a config, nested ones included, that is set to another value than its default."""
    return [path for path, _, info in changed_fields(config) if not info.is_required()]
