"""The base class of the parts of a run: a name, a strict frozen config, and state for the checkpoint."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class ComponentConfig(BaseModel):
    """Base of every config. It is frozen, refuses unknown keys and converts no values. The docstring below a field
    documents it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Component:
    """Base of the interfaces of the parts of a run. Not used directly.

    A subclass sets ``name`` (lower case, ``[a-z0-9_]+``, equal to its entry point's name). If it has options, it also
    defines a nested ``Config``. The runtime builds one instance as ``cls(config)``.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    """Paper or documentation that the component implements, shown by ``rlhf plugins show``."""
    Config: ClassVar[type[ComponentConfig]] = ComponentConfig
    layout: ClassVar[frozenset[str]] = frozenset()
    """Options that may change on resume, because they say where and how fast the component works (addresses, timeouts,
    sharding), not what it computes. ``*`` is any name in a table: ``mcp.*.url``."""

    def __init__(self, config: ComponentConfig | None = None) -> None:
        self.config: Any = self.Config() if config is None else config

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint, as JSON values. Empty for most components."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state but was given {sorted(state)}")


class Ability(ABC):  # noqa: B024 - the methods are in its subclasses
    """Base of the classes for features that only some components of a kind have, such as
    :class:`rlhf.interfaces.Offloads`. A component with the feature derives from the class, listed before its
    interface."""


def abilities(cls: type[Any]) -> list[str]:
    """Names of the abilities that a class derives from."""
    return sorted(
        c.__name__
        for c in cls.__mro__[1:]
        if issubclass(c, Ability) and not issubclass(c, Component) and c is not Ability
    )
