"""A run's control for tests of observers. It records requests and changes no run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf.errors import ConfigError
from rlhf.interfaces import RunControl


class RecordedControl(RunControl):
    """``requests`` holds every request: ``("stop", reason)``, ``("save",)``, ``("change", option, value)``."""

    def __init__(self) -> None:
        self.requests: list[tuple[Any, ...]] = []
        self._options: dict[str, Any] = {"trainer.lr": 1e-3}

    def stop(self, reason: str) -> None:
        self.requests.append(("stop", reason))

    def save(self) -> None:
        self.requests.append(("save",))

    @property
    def changeable(self) -> Mapping[str, Any]:
        return dict(self._options)

    def change(self, option: str, value: Any) -> None:
        if option not in self._options:
            raise ConfigError(f"the option {option!r} cannot be changed; those that can are {', '.join(self._options)}")
        self._options[option] = value
        self.requests.append(("change", option, value))
