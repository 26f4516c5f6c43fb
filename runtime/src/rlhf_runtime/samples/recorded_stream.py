"""Batches that another run trained on, in its order. Nothing is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import TrainingError
from rlhf.types import Group

from rlhf_runtime.checkpoint.saved_groups import FindRow, read_groups
from rlhf_runtime.samples.pending_groups import oldest_version
from rlhf_runtime.samples.stream import ReadyBatch, Stream


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
