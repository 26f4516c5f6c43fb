"""Refuses arguments that ``rlhf.train`` does not have, and names the argument or option that may be meant."""

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
    """Wraps ``function``. The result raises ConfigError in place of TypeError for a keyword that ``function`` does not
    have, and for an argument that must be given by its name."""
    parameters = inspect.signature(function).parameters
    by_place = [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > len(by_place):
            raise ConfigError(
                f"rlhf.{function.__name__} got {len(args)} arguments without a name; only {', '.join(by_place)} may be "
                f"given so. Name the others: rlhf.{function.__name__}(..., model=..., data=...)."
            )
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
    defaults = {kind: RunFile.model_fields[kind].default for kind in SINGLE}
    if isinstance(algorithm, str):
        defaults["algorithm"] = Choice(use=algorithm)
    choices = [(kind, kind, choice) for kind, choice in defaults.items() if isinstance(choice, Choice)]
    return Suggestions(Plugins.discover(), choices).suggest(name, arguments, False)
