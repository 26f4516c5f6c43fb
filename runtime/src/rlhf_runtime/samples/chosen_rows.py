"""The rows of a continuous stream, if a curriculum chooses them, and what the curriculum is told of their groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rlhf.errors import CheckpointError
from rlhf.interfaces import FinishedGroup
from rlhf.interfaces.curriculum import Fate
from rlhf.saved import WAY_OUT
from rlhf.types import Group, Row

from rlhf_runtime.data.chosen_order import ChosenOrder
from rlhf_runtime.samples.stream import Rows


class ChosenRows:
    """Rows are chosen when their groups are started. At that moment the curriculum knows the groups of every batch that
    was taken before, and every group that was rejected before the last of these batches was taken.

    Groups are started when a step took its batch and when a group was rejected. So without rejected groups and without
    ``stream.oversample`` the rows that are the n-th batch in the order of submission are chosen knowing batches 0 to
    n - staleness - 1, as in waves.
    """

    def __init__(self, rows: Rows, order: ChosenOrder, batch_size: int) -> None:
        self._rows, self._order, self._batch_size = rows, order, batch_size
        self._step = 0
        """The step that rows were chosen for last."""
        self._rejected: list[FinishedGroup] = []
        """Groups that were rejected since the last batch was taken."""
        self._metrics: dict[int, dict[str, float]] = {}
        """{step: the curriculum's metrics when rows were chosen for it last}."""

    def take(self, batches: int, pending: int, room: int) -> list[Row]:
        """Rows of one batch, at most ``room``.

        Args:
            batches: batches taken so far.
            pending: groups that were started and are not trained on yet.
            room: how many groups may be started, at least 1.
        """
        step, begun = divmod(batches * self._batch_size + pending, self._batch_size)
        self._step = max(self._step, step)  # a rejected group leaves its place to one that was chosen for a later step
        rows = self._rows.take(min(room, self._batch_size - begun), self._step)
        self._metrics[self._step] = self._order.metrics()
        return rows

    def rejected(self, group: Group, fate: Fate) -> None:
        """A group is not trained on."""
        self._rejected.append(self._order.finished_group(group, 0, fate))

    def finish(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Tell the curriculum of the batch of ``step``. Returns its metrics of the batch."""
        finished = [self._order.finished_group(group, step, "kept") for group in groups]
        finished += [replace(group, step=step) for group in self._rejected]
        self._rejected = []
        self._order.tell(sorted(finished, key=lambda group: group.number))
        return self._metrics.pop(step, {})

    def state_dict(self) -> dict[str, Any]:
        metrics = {str(step): values for step, values in self._metrics.items()}
        return {"step": self._step, "rejected": [asdict(group) for group in self._rejected], "metrics": metrics}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Raises CheckpointError if the checkpoint is of a run without a curriculum."""
        if state is None:
            raise CheckpointError(f"stream.chosen of the checkpoint is missing. {WAY_OUT}")
        self._step, self._rejected = state["step"], self._order.restored(state["rejected"])
        self._metrics = {int(step): dict(values) for step, values in state["metrics"].items()}
