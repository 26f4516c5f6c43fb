"""Observers: listeners to the events of a run. They change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.interfaces.component import Component
from rlhf.types import Group


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


class Observer(Component):
    """Called on the driver, in the order the observers are listed. What one raises ends the run with its name;
    ``state_dict`` keeps a logger's run id over a resume."""

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
