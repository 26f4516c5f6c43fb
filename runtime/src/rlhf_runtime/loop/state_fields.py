"""The fields of ``state.json`` with their types, as :mod:`rlhf_runtime.loop.checkpoint_state` writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from rlhf.interfaces.curriculum import Fate
from rlhf.saved import Counter, Saved


def _number(text: str) -> str:
    float(text)  # raises ValueError, which says what it got
    return text


class SavedSource(Saved):
    fingerprint: str
    rows: Counter


class SavedOrder(Saved):
    """:class:`rlhf_runtime.data.order.RowOrder`."""

    drawn: list[Counter]
    seed: int
    shuffle: bool
    probabilities: list[float | None]
    sources: dict[str, SavedSource]


class SavedData(Saved):
    """:class:`rlhf_runtime.data.dataset.TrainData`."""

    order: SavedOrder
    dropped: Counter
    bad_rows: Counter = 0


class SavedGroup(Saved):
    """:class:`rlhf.interfaces.curriculum.FinishedGroup`."""

    row: Counter
    number: Counter
    step: Counter
    scores: list[float]
    fate: Fate


class SavedBatch(Saved):
    version: Counter
    counts: dict[str, float]
    groups: Counter
    finished: list[SavedGroup] = []
    """For the curriculum, as ``chosen``; absent without one."""
    chosen: dict[str, float] = {}


class SavedStream(Saved):
    """:class:`rlhf_runtime.samples.wave_stream.WaveStream`."""

    rows: SavedData
    generated: Counter
    next_number: Counter
    ready: list[SavedBatch]


class SavedPending(Saved):
    version: Counter
    scored: bool
    finished: Counter
    logs: list[list[list[Counter]]] = []
    """Of each sample, for each of its turns: its number and the checksum of its context."""


class SavedChosenRows(Saved):
    """:class:`rlhf_runtime.samples.chosen_rows.ChosenRows`."""

    step: Counter
    rejected: list[SavedGroup]
    metrics: dict[str, dict[str, float]]


class SavedContinuousStream(Saved):
    """:class:`rlhf_runtime.samples.continuous_stream.ContinuousStream`."""

    rows: SavedData
    next_number: Counter
    taken: Counter
    finished: Counter
    rejected: Counter
    counts: dict[str, float]
    pending: list[SavedPending]
    unfinished_tokens: Counter
    """Of turns that were being sampled. A resume samples them again."""
    chosen: SavedChosenRows | None = None
    """Absent without a curriculum."""


class SavedRecordedStream(Saved):
    """:class:`rlhf_runtime.samples.recorded_stream.RecordedStream`."""

    taken: Counter


class SavedBest(Saved):
    """:class:`rlhf_runtime.observe.best_value.BestTracker`."""

    metric: str | None
    mode: Literal["max", "min"]
    value: Annotated[str, AfterValidator(_number)] | None
    step: Counter | None
    waited: Counter


class SavedState(Saved):
    step: Counter
    updates: Counter
    components: dict[str, dict[str, Any]]
    stream: SavedStream | None = None
    data: SavedData | None = None
    best: SavedBest | None = None
    changed: dict[str, Any] = {}
    """:attr:`rlhf_runtime.loop.control.Control.changed`."""
    unevaluated: str | None = None
    """:attr:`rlhf_runtime.loop.checkpoint_state.RunState.unevaluated`, as JSON."""


class SavedContinuousState(SavedState):
    """The state of a run with ``stream.mode = "continuous"``."""

    stream: SavedContinuousStream | None = None  # type: ignore[assignment]


class SavedReplayState(SavedState):
    """The state of a run with ``stream.replay``."""

    stream: SavedRecordedStream | None = None  # type: ignore[assignment]
