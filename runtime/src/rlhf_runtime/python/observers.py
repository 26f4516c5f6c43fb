"""What ``rlhf.train(observers=...)`` takes: names, Observer classes and instances, and plain functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.errors import ConfigError, shown
from rlhf.interfaces import Observer, RunInfo
from rlhf.plugins import Plugins
from rlhf.plugins.functions import is_async

from rlhf_runtime.python.components import Entry, component_class, is_component, listed, plugin_name, register

PARAMETERS = ("step", "metrics", "control")
FORM = (
    "An observer is a function `def f(step, metrics, control)`, called after each step, an Observer class or instance, "
    "or a name like 'wandb'."
)


def observer_entries(plugins: Plugins, observers: Any) -> list[Entry]:
    """The ``[[observer]]`` sections of the run file, for one observer or a list. Raises ConfigError."""
    if isinstance(observers, Mapping):
        raise ConfigError(f"observers: a list, got {shown(observers)}. {FORM}")
    return [
        {"use": item} if isinstance(item, str) else _registered(plugins, item)
        for _, item in listed(observers, "observers")
    ]


def _registered(plugins: Plugins, item: Any) -> Entry:
    if is_component(item, Observer):
        cls, options = component_class(item, None)
        return {"use": register(plugins, "observer", cls), **options}
    if isinstance(item, type) or not callable(item):
        raise ConfigError(f"observers: got {shown(item)}. {FORM}")
    return {"use": register(plugins, "observer", observer_class(item))}


def observer_class(function: Callable[..., Any]) -> type[Observer]:
    """An Observer that calls ``function(step, metrics, control)`` after each step."""
    name = getattr(function, "__name__", type(function).__name__)
    if is_async(function):
        raise ConfigError(f"observer {name!r} is `async def`, which is never awaited: write it as plain `def`. {FORM}")
    if (parameters := tuple(inspect.signature(function).parameters)) != PARAMETERS:
        raise ConfigError(f"observer {name!r} has the parameters ({', '.join(parameters)}). {FORM}")

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
