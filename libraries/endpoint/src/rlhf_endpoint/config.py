"""Options that rollouts with a program and the endpoint share."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field
from rlhf.errors import ConfigError
from rlhf.interfaces import ComponentConfig


class ProgramConfig(ComponentConfig):
    concurrency: Annotated[int, Field(gt=0)] = 64
    """How many samples are under way at once."""
    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("policy",)
    """The names under which the program asks for the policy."""
    sampling: Literal["request", "run"] = "request"
    """``request``: requests may set the temperature; one that training cannot learn from is answered with an error.
    ``run``: the temperature, ``top_p`` and penalties of requests are ignored, as ``[sampling]`` decides."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that the program gets, besides ``PATH``, ``HOME`` and the like."""


def check_environment(config: ProgramConfig) -> None:
    """Raises ConfigError: a variable that the program is to get is not set."""
    unset = [name for name in config.environment if name not in os.environ]
    if unset:
        raise ConfigError(f"rollout.environment: {', '.join(unset)} is not set here. Export it, or remove it.")
