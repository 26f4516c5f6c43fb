"""The stream of training batches, as the loop sees it. :mod:`rlhf_runtime.samples.wave_stream` generates whole batches
in order; :mod:`rlhf_runtime.samples.continuous_stream` lets every sample go on by itself; :class:`RecordedStream`
repeats the batches of another run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhf.errors import TrainingError
from rlhf.interfaces import FinishedGroup
from rlhf.types import Group, Row

from rlhf_runtime.checkpoint.saved_groups import FindRow, read_groups
from rlhf_runtime.samples.pending_groups import oldest_version


class Rows(Protocol):
    """An endless, seeded, resumable order of rows (:class:`rlhf_runtime.data.row_order.RowOrder`)."""

    def take(self, n: int, step: int = 0) -> list[Row]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(slots=True)
class ReadyBatch:
    """One generated batch, with counts of what happened to the prompts drawn for it."""

    groups: list[Group]
    version: int
    """Weight version that its oldest sample was started with."""
    counts: dict[str, float] = field(default_factory=dict)
    finished: list[FinishedGroup] = field(default_factory=list)
    """Every group that was generated for the batch, for the curriculum."""
    curriculum_metrics: dict[str, float] = field(default_factory=dict)
    """The curriculum's metrics of the batch."""


class Stream(ABC):
    """``start(step)`` generates, or lets generate, what a step may use. ``take(step)`` hands out the step's batch."""

    @abstractmethod
    def start(self, step: int) -> None:
        """Called at the beginning of every step, with the weights that generation may use from now on."""

    @abstractmethod
    def take(self, step: int) -> ReadyBatch:
        """The batch of ``step``: scored, filtered and refilled. Each is taken once, in order."""

    @abstractmethod
    def samples_with(self, version: int) -> bool:
        """Whether training samples are drawn with the weights of ``version``."""

    @abstractmethod
    def snapshot(self, beside: Callable[[], object] = lambda: None) -> tuple[dict[str, Any], list[Group]]:
        """What a checkpoint holds: counters with the data order, and the groups that no step has trained on yet.

        Args:
            beside: called at the same moment: no row is chosen and no group ends between the two.
        """

    @abstractmethod
    def restore(self, state: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Continue from a :meth:`snapshot`."""

    @staticmethod
    @abstractmethod
    def saved_groups(state: Mapping[str, Any]) -> list[bool]:
        """For each group that belongs to the counters of a :meth:`snapshot`: whether its samples are complete."""

    def hold(self) -> None:  # noqa: B027 - whole batches are generated while nothing else is
        """Wait until the generator works on no training sample. It gets none before :meth:`release`."""

    def release(self) -> None:  # noqa: B027
        """Go on after :meth:`hold`."""

    def close(self) -> None:  # noqa: B027 - a stream without background work has nothing to end
        """End what goes on in the background."""


class RecordedStream(Stream):
    """What a run recorded in ``rollouts/``: which groups made which batch, with their tokens, log-probs, versions and
    rewards.

    Args:
        file: {number of finished steps: file with the samples of the last of them}.
        find: gives the row of a source at an index.
        oldest: largest number of steps between the weights of a token and the step that trains on it.
    """

    def __init__(self, file: Callable[[int], Path], find: FindRow, oldest: int) -> None:
        self._file, self._find, self._oldest = file, find, oldest
        self.batches_taken = 0

    def start(self, step: int) -> None:
        """Does nothing: every group is recorded."""

    def take(self, step: int) -> ReadyBatch:
        if step != self.batches_taken:
            raise TrainingError(
                f"the batch of step {step} was asked for, but the next one is of step {self.batches_taken}"
            )
        groups = read_groups(self._file(step + 1), self._find)
        self.batches_taken += 1
        version = min((v for group in groups if (v := oldest_version(group)) is not None), default=step)
        if step - version > self._oldest:
            raise TrainingError(
                f"{self._file(step + 1)} records tokens of version {version} for step {step + 1}. With this run's "
                f"stream.staleness and stream.round they must be of version {step - self._oldest} or newer: the file "
                "is of another step or another run."
            )
        return ReadyBatch(groups, version)

    def samples_with(self, version: int) -> bool:
        return False

    def snapshot(self, beside: Callable[[], object] = lambda: None) -> tuple[dict[str, Any], list[Group]]:
        beside()
        return {"taken": self.batches_taken}, []

    @staticmethod
    def saved_groups(state: Mapping[str, Any]) -> list[bool]:
        return []

    def restore(self, state: Mapping[str, Any], groups: Sequence[Group]) -> None:
        self.batches_taken = state["taken"]
