"""Observers: listeners to the events of a run. Through :class:`RunControl` they may stop, save and change it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.interfaces.component import Component
from rlhf.types import Group


class RunControl(ABC):
    """What an observer may ask of the run it listens to. A request takes effect between two steps: at the end of the
    step under way, or before the first step."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """End the run, with a checkpoint, as Ctrl-C does. ``reason`` is shown and kept in the manifest."""

    @abstractmethod
    def save(self) -> None:
        """Save a checkpoint."""

    @property
    @abstractmethod
    def changeable(self) -> Mapping[str, Any]:
        """{option that :meth:`change` takes: its value of now}."""

    @abstractmethod
    def change(self, option: str, value: Any) -> None:
        """Give an option another value, e.g. ``change("trainer.lr", 1e-6)``. A checkpoint keeps the value, and a resume
        goes on with it.

        Raises ConfigError: the option cannot be changed while a run trains, or does not take the value.
        """


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run is, at its start."""

    name: str
    output: Path
    config: Mapping[str, Any]
    """The resolved run file; holds no secrets."""
    total_steps: int
    first_step: int
    """Above 0 after a resume."""
    control: RunControl
    """Keep it to stop, save or change the run later."""


class Observer(Component):
    """Called on the driver, in the order the observers are listed. What one raises ends the run with its name;
    ``state_dict`` keeps a logger's run id over a resume. Complete example::

        class Patience(Observer):
            name = "patience"

            def run_started(self, info):
                self.control = info.control

            def step_finished(self, step, metrics):
                if metrics.get("reward/mean", 0.0) > 0.99:
                    self.control.stop("the reward is reached")
    """

    def check(self, output: Path) -> None:
        """Refuse before anything is started or made what :meth:`run_started` would fail for, as far as it shows without
        a network: a folder that cannot be, a login that is not there. Raises ConfigError.

        Args:
            output: the run's folder, which may not exist yet.
        """

    def run_started(self, info: RunInfo) -> None:
        """Before the first step."""

    def rollouts_finished(self, step: int, groups: Sequence[Group]) -> None:
        """With the groups that the step is trained on (online only)."""

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """With the line that goes to ``metrics.jsonl``; ``step`` counts from 1 for the first finished step."""

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """After a checkpoint is complete on disk."""

    def run_ended(self, status: str) -> None:
        """``finished`` | ``stopped`` (signal, early stop) | ``failed``."""
