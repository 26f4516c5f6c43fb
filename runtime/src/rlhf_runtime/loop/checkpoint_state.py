"""Write and read the content of a checkpoint.

``state.json``: step, stream counters, state of algorithm, parts, rewards, rollout, curriculum, observers, best metric.
``ready.arrow``: the generated batches that no step has trained on yet. ``roles/<name>/``: the files of each trained
role's trainer (weights, optimizer, schedule, EMA). A frozen role is loaded from its model again, unless a snapshot
changed it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from rlhf.errors import CheckpointError, boundary, brief
from rlhf.interfaces import Algorithm, Component, Observer, Reward, Rollout
from rlhf.interfaces.curriculum import Outcome
from rlhf.saved import Counter, Saved, refuse, validated
from rlhf.types import Group

from rlhf_runtime.calls.returned_values import InvalidResult, check_turns
from rlhf_runtime.checkpoint.json_values import dumps, encode, loads, read_json, write_json
from rlhf_runtime.checkpoint.saved_groups import read_groups, write_groups
from rlhf_runtime.checkpoint.store import Checkpoint
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.loop.best_value import BestTracker
from rlhf_runtime.loop.control import Control
from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.models.roles import Role
from rlhf_runtime.samples.continuous_stream import ContinuousStream
from rlhf_runtime.samples.stream import RecordedStream, Stream


def _number(text: str) -> str:
    float(text)  # raises ValueError that contains the text
    return text


class SavedSource(Saved):
    fingerprint: str
    rows: Counter


class SavedOrder(Saved):
    """The state of a :class:`rlhf_runtime.data.row_order.RowOrder`."""

    drawn: list[Counter]
    seed: int
    shuffle: bool
    probabilities: list[float | None]
    sources: dict[str, SavedSource]


class SavedData(Saved):
    """The state of a :class:`rlhf_runtime.data.dataset.TrainData`."""

    order: SavedOrder
    dropped: Counter
    bad_rows: Counter = 0


class SavedGroup(Saved):
    """The fields of a :class:`rlhf.interfaces.curriculum.FinishedGroup`."""

    row: Counter
    number: Counter
    step: Counter
    scores: list[float]
    outcome: Outcome


class SavedBatch(Saved):
    version: Counter
    counts: dict[str, float]
    groups: Counter
    finished: list[SavedGroup] = []
    """The results of the batch's groups for the curriculum. Like ``chosen``, it is absent without a curriculum."""
    chosen: dict[str, float] = {}


class SavedStream(Saved):
    """The state of a :class:`rlhf_runtime.samples.stream.WaveStream`."""

    rows: SavedData
    generated: Counter
    next_number: Counter
    ready: list[SavedBatch]


class SavedPending(Saved):
    version: Counter
    scored: bool
    finished: Counter
    logs: list[list[list[Counter]]] = []
    """For each sample, for each of its turns: its number and the checksum of its context."""


class SavedCurriculum(Saved):
    """The state of a :class:`rlhf_runtime.samples.continuous_stream.ContinuousCurriculum`."""

    step: Counter
    rejected: list[SavedGroup]
    metrics: dict[str, dict[str, float]]


class SavedContinuousStream(Saved):
    """The state of a :class:`rlhf_runtime.samples.continuous_stream.ContinuousStream`."""

    rows: SavedData
    next_number: Counter
    taken: Counter
    finished: Counter
    rejected: Counter
    counts: dict[str, float]
    pending: list[SavedPending]
    unfinished_tokens: Counter
    """Number of tokens of turns that were being sampled. A resume samples these turns again."""
    chosen: SavedCurriculum | None = None
    """Absent without a curriculum."""


class SavedRecordedStream(Saved):
    """The state of a :class:`rlhf_runtime.samples.stream.RecordedStream`."""

    taken: Counter


class SavedBestTracker(Saved):
    """The state of a :class:`rlhf_runtime.loop.best_value.BestTracker`."""

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
    best: SavedBestTracker | None = None
    changed: dict[str, Any] = {}
    """:attr:`rlhf_runtime.loop.control.Control.changes`."""
    unfinished: str | None = None
    """:attr:`rlhf_runtime.loop.checkpoint_state.RunState.unfinished`, as JSON."""


class SavedContinuousState(SavedState):
    """The state of a run with ``stream.mode = "continuous"``."""

    stream: SavedContinuousStream | None = None  # type: ignore[assignment]


class SavedReplayState(SavedState):
    """The state of a run with ``stream.replay``."""

    stream: SavedRecordedStream | None = None  # type: ignore[assignment]


FORMS: Mapping[type[Stream], type[SavedState]] = {
    ContinuousStream: SavedContinuousState,
    RecordedStream: SavedReplayState,
}
"""The form of ``state.json`` for streams other than :class:`WaveStream`."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of a run after ``step`` finished steps, without the weights. Its values are copies that later steps do
    not change."""

    step: int
    values: dict[str, Any]
    ready: list[Group]


class RunState:
    """The state that a run needs to continue after a step as if it had not stopped.

    Args:
        stream: the stream of an online run; None in an offline run, which takes rows from ``data``.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        roles: Mapping[str, Role],
        data: TrainData,
        stream: Stream | None,
        rewards: Mapping[str, Reward],
        observers: Mapping[str, Observer],
        best: BestTracker | None,
        control: Control,
        rollout: Rollout | None = None,
    ) -> None:
        self.roles, self.data, self.stream, self.best, self.control = roles, data, stream, best, control
        self.trained_roles = tuple(name for name, role in roles.items() if role.spec.role.trained)
        self.saved_roles = tuple(n for n, role in roles.items() if role.spec.role.trained or role.spec.replaced)
        """Roles whose weights a checkpoint must hold, because no model in the run file has them."""
        self.components: dict[str, Component] = {"algorithm": algorithm}
        """Every component whose state is in the checkpoint, by a stable name."""
        self.components |= {f"algorithm.{slot}": part for slot, part in algorithm.parts.items()}
        self.components |= {f"reward.{name}": reward for name, reward in rewards.items()}
        if data.curriculum is not None:
            self.components["curriculum"] = data.curriculum.plugin
        # Most rollouts keep none.
        if rollout is not None and type(rollout).state_dict is not Component.state_dict:
            self.components["rollout"] = rollout
        self.components |= {f"observer.{name}": observer for name, observer in observers.items()}
        self.updates = 0
        """Number of steps that changed weights, including those before a resume."""
        self.unfinished: Metrics | None = None
        """The metrics of the last step, if the checkpoint was saved because its sync, its evaluation or an observer
        failed."""

    def collect(self, step: int, unfinished: Metrics | None = None) -> State:
        """The current state. It may be written later, as long as the weights do not change."""
        components: dict[str, dict[str, Any]] = {}

        def keep(names: Collection[str]) -> None:
            for name in (name for name in self.components if name in names):
                with boundary(CheckpointError, f"state_dict() of {name}"):
                    components[name] = self.components[name].state_dict()

        stream_components = {n for n in self.components if n in ("curriculum", "rollout") or n.startswith("reward.")}
        keep(set(self.components) - stream_components)
        values: dict[str, Any] = {"step": step, "updates": self.updates, "components": components}
        pending: list[Group] = []
        if self.stream is not None:  # a continuous stream takes rows, plays and scores samples at any time
            values["stream"], pending = self.stream.snapshot(partial(keep, stream_components))
        else:
            keep(stream_components)
            values["data"] = self.data.state_dict()
        if self.control.changes:
            values["changed"] = dict(self.control.changes)
        if unfinished is not None:
            values["unfinished"] = dumps(unfinished, f"metrics of step {step}", nonfinite="mark")
        if self.best is not None:
            values["best"] = self.best.state_dict()
        return State(step, encode(values), pending)

    def write(self, folder: Path, step: int, state: State | None = None) -> None:
        """Write the current weights and ``state`` (default: the current state) after ``step`` finished steps."""
        for name in self.saved_roles:
            path = folder / "roles" / name
            path.mkdir(parents=True)
            self.roles[name].every("save", path)
        state = state or self.collect(step)
        if self.stream is not None:
            write_groups(folder / "ready.arrow", state.ready)
        write_json(folder / "state.json", state.values)

    def read(self, checkpoint: Checkpoint) -> int:
        """Restore what :meth:`write` wrote. Returns the number of finished steps.

        Raises CheckpointError that names the file and the field that is invalid or cannot be restored.
        """
        folder, path = checkpoint.path, checkpoint.path / "state.json"
        state = read_json(path)
        form = next((form for kind, form in FORMS.items() if isinstance(self.stream, kind)), SavedState)
        saved_state = validated(form, state, path)
        encode(state, str(path))  # no number in it is NaN or infinite
        if saved_state.step != checkpoint.step:
            refuse(path, f"step: {saved_state.step}, but the checkpoint is of step {checkpoint.step}.")
        key = "data" if self.stream is None else "stream"
        if state.get(key) is None:
            refuse(path, f"{key}: missing.")
        for name in self.saved_roles:
            saved_role = folder / "roles" / name
            if name in self.trained_roles or saved_role.is_dir():  # a shorter run may not have reached a snapshot
                self.roles[name].every("load", saved_role)
        saved = {name: value for name, value in state["components"].items() if not name.startswith("observer.")}
        needed = {name: c for name, c in self.components.items() if not name.startswith("observer.")}
        if set(needed) != set(saved):
            raise CheckpointError(
                f"the checkpoint {folder} holds the state of {sorted(saved)}, but this run has {sorted(needed)}"
            )
        if self.stream is not None:
            complete = self.stream.saved_groups(state["stream"])
            self.stream.restore(state["stream"], _ready_groups(self.data, complete, folder / "ready.arrow"))
        else:
            self.data.load_state_dict(state["data"])
        for name, component in self.components.items():
            if name in state["components"]:  # observers may be added and removed: they change nothing of the run
                _restore(name, component, state["components"][name], path)
        if self.best is not None and saved_state.best is not None:  # an evaluation may be added and removed, too
            self.best.load_state_dict(state["best"])
        self.control.restore(saved_state.changed)
        self.updates = saved_state.updates
        if saved_state.unfinished is not None:
            self.unfinished = loads(saved_state.unfinished, f"{path}, unfinished")
        return saved_state.step


def _restore(name: str, component: Component, saved: dict[str, Any], path: Path) -> None:
    """Restore a component's state, and check the result, because a loader could convert a wrong value silently."""
    label = f"load_state_dict() of {name} ({type(component).__name__}), given components.{name} of {path},"
    with boundary(CheckpointError, label):
        component.load_state_dict(saved)
        if name.startswith("observer."):  # it changes nothing of the run, and may have no state before it has started
            return
        result = encode(component.state_dict(), f"state_dict() of {name}")
    if changed_keys := [key for key in saved if key in result and dumps(saved[key]) != dumps(result[key])]:
        key = changed_keys[0]
        refuse(
            path,
            f"components.{name}.{key}: {brief(saved[key])} became {brief(result[key])} when it was loaded.",
        )


def _ready_groups(data: TrainData, complete: Sequence[bool], path: Path) -> list[Group]:
    """The groups that were generated, completely or partly, and that no step has trained on yet.

    Args:
        complete: :meth:`rlhf_runtime.samples.stream.Stream.saved_groups`.
    """
    groups = read_groups(path, data.row)
    if len(groups) != len(complete):
        refuse(path, f"it has {len(groups)} groups, but state.json counts {len(complete)}.")
    for group in compress(groups, complete):
        for trajectory in (t for t in group.trajectories if not t.is_demonstration):
            try:
                check_turns(trajectory.turns, agents=[trajectory.agent])
            except InvalidResult as error:
                refuse(path, f"group {group.number}, sample {trajectory.index[1]}: {error}.")
    return groups
