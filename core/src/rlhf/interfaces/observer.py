"""Observers: receive the events of a run. Through :class:`RunControl` they may stop, save and change it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.interfaces.component import Component
from rlhf.types import Group


class RunControl(ABC):
    """Requests that an observer may make to its run. A request takes effect between two steps: at the end of the
    current step, or before the first step."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """End the run, with a checkpoint, as Ctrl-C does. ``reason`` is shown and kept in the manifest."""

    @abstractmethod
    def save(self) -> None:
        """Save a checkpoint."""

    @property
    @abstractmethod
    def changeable(self) -> Mapping[str, Any]:
        """{option that :meth:`change` accepts: its current value}."""

    @abstractmethod
    def change(self, option: str, value: Any) -> None:
        """Change an option, e.g. ``change("trainer.lr", 1e-6)``. A checkpoint keeps the value, and a resume continues
        with it.

        Raises ConfigError: the option cannot be changed during a run, or does not accept the value.
        """


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A description of the run at its start."""

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
    """Called on the driver, in the order in which the run file lists the observers. An exception ends the run with an
    error that names the observer, or the run continues without it (``on_error``). ``state_dict`` keeps a logger's run
    id across a resume. Complete example::

        class Patience(Observer):
            name = "patience"

            def run_started(self, info):
                self.control = info.control

            def step_finished(self, step, metrics):
                if metrics.get("reward/mean", 0.0) > 0.99:
                    self.control.stop("the reward is reached")
    """

    def check(self, output: Path) -> None:
        """Refuse settings with which :meth:`run_started` would fail, before anything is started or created and without
        using the network: a folder that cannot be created, a missing login. Raises ConfigError.

        Args:
            output: the run's folder, which may not exist yet.
        """

    def run_started(self, info: RunInfo) -> None:
        """Called before the first step."""

    def rollouts_finished(self, step: int, groups: Sequence[Group]) -> None:
        """Called with the groups that the step trains on (online only)."""

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the step's line of ``metrics.jsonl``. ``step`` is 1 for the first finished step. If an observer
        raises, a resume calls all of them again, with the state from before."""

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """Called when a checkpoint is complete on disk."""

    def run_ended(self, status: str) -> None:
        """Called at the end. ``status``: ``finished`` | ``stopped`` (signal, early stop) | ``failed``."""
