"""Refuses arguments that ``rlhf.train`` does not have, with the argument or option that is meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from rlhf.errors import ConfigError
from rlhf.plugins import Plugins

from rlhf_runtime.config.runfile import SINGLE, RunFile
from rlhf_runtime.config.sections import Choice
from rlhf_runtime.config.suggestions import Suggestions

P = ParamSpec("P")
R = TypeVar("R")


def only_known(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which then raises ConfigError in place of TypeError for a keyword that it does not have."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters:
                algorithm = args[0] if args else kwargs.get("algorithm")
                raise ConfigError(
                    f"rlhf.{function.__name__} has no argument {name!r}.{_near(name, tuple(parameters), algorithm)} "
                    f"The arguments are {', '.join(parameters)}. An option of the run file is given by its name, e.g. "
                    'options={"trainer.lr": 1e-5}.'
                )
        return function(*args, **kwargs)

    return checked


def _near(name: str, arguments: tuple[str, ...], algorithm: Any) -> str:
    """`` Did you mean ...?`` with an argument, or with options of a run of that algorithm; or an empty string."""
    usual = {kind: RunFile.model_fields[kind].default for kind in SINGLE}
    if isinstance(algorithm, str):
        usual["algorithm"] = Choice(use=algorithm)
    chosen = [(kind, kind, choice) for kind, choice in usual.items() if isinstance(choice, Choice)]
    return Suggestions(Plugins.discover(), chosen).near(name, arguments, False)
