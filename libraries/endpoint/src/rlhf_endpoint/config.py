"""Options that rollouts with a program and the endpoint share."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field
from rlhf.errors import ConfigError
from rlhf.interfaces import ComponentConfig


class ProgramConfig(ComponentConfig):
    concurrency: Annotated[int, Field(gt=0)] = 64
    """Largest number of samples under way at once."""
    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("policy",)
    """Model names under which the program calls the policy."""
    sampling: Literal["request", "run"] = "request"
    """``request``: requests may set the temperature. A request that training cannot learn from gets an error. ``run``:
    the temperature, ``top_p`` and penalties of requests are ignored, and ``[sampling]`` applies."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that the program gets in addition to ``PATH``, ``HOME`` and the like."""


def check_environment(config: ProgramConfig) -> None:
    """Raises ConfigError if a variable that is passed to the program is not set."""
    unset = [name for name in config.environment if name not in os.environ]
    if unset:
        raise ConfigError(f"rollout.environment: {', '.join(unset)} is not set here. Export it, or remove it.")
