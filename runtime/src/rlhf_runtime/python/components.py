"""The arguments ``reward`` and ``observers`` of ``rlhf.train``: references, classes and instances of components, and
plain functions (:mod:`rlhf.plugins.functions` has the forms of reward functions). They are registered as plugins of the
run and selected by name, like other plugins.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.errors import ConfigError, brief
from rlhf.interfaces import Component, Observer, Reward, RunInfo
from rlhf.plugins import Plugins
from rlhf.plugins.functions import FORMS, form_of_function, is_async
from rlhf.plugins.resolved import IN_PROCESS
from rlhf.plugins.reward_functions import reward_of_function


def reward_entries(plugins: Plugins, rewards: Any) -> list[Entry]:
    """The ``[[reward]]`` sections of the run file for ``rewards``: one reward, a list, or {name: reward}.

    Raises ConfigError if an item is not a reward, or two have the same name.
    """
    entries: list[Entry] = []
    for name, item in named_items(rewards, "reward"):
        entry: Entry = {"use": item} if isinstance(item, str) else _reward(plugins, name, item)
        entries.append(entry if name is None else {**entry, "name": name})
    labels = [e.get("name") or e["use"] for e in entries]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise ConfigError(
            f"reward: two rewards are called {repeated[0].rpartition('/')[2]!r}. Give them names: "
            "reward={'first': ..., 'second': ...}."
        )
    return entries


def _reward(plugins: Plugins, name: str | None, item: Any) -> Entry:
    if is_component(item, Reward):
        cls, options = component_class(item, name)
        return {"use": register(plugins, "reward", cls), **options}
    if isinstance(item, type) or not callable(item):
        raise ConfigError(
            f"reward: got {brief(item)}; give a function, a Reward class or instance, or a reference like 'math' or "
            f"'file:reward.py'. A reward function is {FORMS}."
        )
    return {"use": register(plugins, "reward", reward_class(item, name))}


def reward_class(function: Callable[..., Any], name: str | None = None) -> type[Reward]:
    """A Reward class that calls ``function``. Raises ConfigError if its parameters match no form."""
    function_name = getattr(function, "__name__", type(function).__name__)
    label = f"reward function {function_name!r}"
    form = form_of_function(function)
    if form is None:
        try:
            signature = str(inspect.signature(function))
        except (TypeError, ValueError) as cause:
            raise ConfigError(
                f"{label}: its parameters cannot be read: {cause}. A reward function is {FORMS}."
            ) from None
        raise ConfigError(f"{label} has the parameters {signature}. A reward function is {FORMS}.")
    final_name, module = plugin_name(name or function_name), _module_of(function)
    return reward_of_function(
        function, form, name=final_name, class_name=f"Reward_{final_name}", module=module, label=label
    )


def _module_of(function: Callable[..., Any]) -> str:
    """Name of the module that defines a function."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or __name__


OBSERVER_PARAMETERS = ("step", "metrics", "control")
OBSERVER_FORM = (
    "An observer is a function `def f(step, metrics, control)`, called after each step, an Observer class or instance, "
    "or a name like 'wandb'."
)


def observer_entries(plugins: Plugins, observers: Any) -> list[Entry]:
    """The ``[[observer]]`` sections of the run file, for one observer or a list. Raises ConfigError."""
    if isinstance(observers, Mapping):
        raise ConfigError(f"observers: expected a list, got {brief(observers)}. {OBSERVER_FORM}")
    return [
        {"use": item} if isinstance(item, str) else _observer(plugins, item)
        for _, item in named_items(observers, "observers")
    ]


def _observer(plugins: Plugins, item: Any) -> Entry:
    if is_component(item, Observer):
        cls, options = component_class(item, None)
        return {"use": register(plugins, "observer", cls), **options}
    if isinstance(item, type) or not callable(item):
        raise ConfigError(f"observers: got {brief(item)}. {OBSERVER_FORM}")
    return {"use": register(plugins, "observer", observer_class(item))}


def observer_class(function: Callable[..., Any]) -> type[Observer]:
    """An Observer that calls ``function(step, metrics, control)`` after each step."""
    name = getattr(function, "__name__", type(function).__name__)
    if is_async(function):
        raise ConfigError(
            f"observer {name!r} is `async def`, which is never awaited: write it as plain `def`. {OBSERVER_FORM}"
        )
    if (parameters := tuple(inspect.signature(function).parameters)) != OBSERVER_PARAMETERS:
        raise ConfigError(f"observer {name!r} has the parameters ({', '.join(parameters)}). {OBSERVER_FORM}")

    def run_started(self: Any, info: RunInfo) -> None:
        self.control = info.control

    def step_finished(self: Any, step: int, metrics: Mapping[str, float]) -> None:
        function(step, metrics, self.control)

    body = {
        "name": plugin_name(name),
        "__module__": getattr(function, "__module__", None) or __name__,
        "__doc__": function.__doc__ or f"Calls {name}(step, metrics, control) after each step.",
        "made_from": staticmethod(function),
        "run_started": run_started,
        "step_finished": step_finished,
    }
    return type(f"Observer_{plugin_name(name)}", (Observer,), body)


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

    If ``component`` is an instance, the class builds components that share its attributes, in this process.

    Args:
        name: name of the class; None: the component's own name, or the name of the Python class.
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


def named_items(items: Any, argument: str) -> list[tuple[str | None, Any]]:
    """A list of (name or None, item) from one item, a list, or {name: item}.

    Raises ConfigError if a name is not text, or is empty.
    """
    if isinstance(items, Mapping):
        for name in items:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"{argument}: a name must be a string, got {brief(name)}")
        pairs: list[tuple[str | None, Any]] = list(items.items())
    elif isinstance(items, list | tuple):
        pairs = [(None, item) for item in items]
    else:
        pairs = [(None, items)]
    return pairs


def is_component(item: Any, interface: type[Component]) -> bool:
    """Whether ``item`` is a class or an instance of the interface."""
    return issubclass(item, interface) if isinstance(item, type) else isinstance(item, interface)
