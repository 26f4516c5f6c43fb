"""Registers classes and instances of this process as plugins of one run. They are selected by name, like any other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlhf.errors import ConfigError, shown
from rlhf.interfaces import Component
from rlhf.plugins import Plugins
from rlhf.plugins.resolved import IN_PROCESS

Entry = dict[str, Any]
"""One table of a list section of the run file: ``use``, ``name`` and the plugin's options."""


def register(plugins: Plugins, kind: str, cls: type[Any]) -> str:
    """Register a class in ``plugins``. Returns the reference that selects it."""
    plugins.register(kind, cls)
    return f"{IN_PROCESS}/{cls.name}"


def plugin_name(text: str) -> str:
    """``text``, with characters replaced that a plugin's name may not have."""
    return re.sub(r"[^a-z0-9_]+", "_", text.lower()).strip("_") or "unnamed"


def component_class(component: Any, name: str | None) -> tuple[type[Any], dict[str, Any]]:
    """Turns a component class or instance into (a named class, its options).

    The class made from an instance builds components that share the attributes of that instance, in this process.

    Args:
        name: name of the class; None: the component's own name, or that of the Python class.
    """
    cls: Any = component if isinstance(component, type) else type(component)
    final_name = plugin_name(name or cls.name or cls.__name__)
    body: dict[str, Any] = {"name": final_name, "made_from": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    if isinstance(component, type):
        return (cls if cls.name == final_name else type(cls.__name__, (cls,), body)), {}

    def share(self: Any, config: Any = None) -> None:
        self.__dict__ = component.__dict__

    body["__init__"] = share
    config = getattr(component, "config", None)
    return type(cls.__name__, (cls,), body), config.model_dump(mode="json", exclude_none=True) if config else {}


def listed(items: Any, argument: str) -> list[tuple[str | None, Any]]:
    """A list of (name or None, item) from what was given: one item, a list, or {name: item}.

    Raises ConfigError where a name is not text, or the list is empty.
    """
    if isinstance(items, Mapping):
        for name in items:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"{argument}: a name is text, got {shown(name)}")
        pairs: list[tuple[str | None, Any]] = list(items.items())
    elif isinstance(items, list | tuple):
        pairs = [(None, item) for item in items]
    else:
        pairs = [(None, items)]
    return pairs


def is_component(item: Any, interface: type[Component]) -> bool:
    """Whether ``item`` is a class or an instance of the interface."""
    return issubclass(item, interface) if isinstance(item, type) else isinstance(item, interface)
