"""Launchers: where workers live and who shares devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rlhf.interfaces.component import Component
from rlhf.interfaces.generator import Generator
from rlhf.interfaces.trainer import ModelSpec, Trainer


class WorkerGroup(ABC):
    """The ranks of one role."""

    size: int
    worker: Any = None
    """The worker itself, where there is one and it lives in this process (``export:module``)."""

    @abstractmethod
    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call ``method`` on every rank, rank i with ``per_rank[i]``; results in rank order."""

    def shutdown(self) -> None:  # noqa: B027 - nothing to release is a valid answer
        """Release the workers."""


class Launcher(Component):
    """Starts trainers and generators; gives the controller the same worker group wherever they live."""

    capabilities: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def launch_trainer(self, trainer: type[Trainer], config: Any, spec: ModelSpec) -> WorkerGroup:
        """One worker per rank, each ``trainer(config, spec)``."""

    @abstractmethod
    def launch_generator(self, build: Callable[[], Generator]) -> Generator:
        """One generator, or a front for several."""

    def shutdown(self) -> None:
        """Release everything that was launched."""
