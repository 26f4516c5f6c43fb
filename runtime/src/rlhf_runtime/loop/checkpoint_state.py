"""What a checkpoint of a run holds, written and read in one place.

``state.json``: step, stream counters, state of algorithm, parts, rewards, observers, best metric. ``ready.jsonl``: the
generated batches that were not trained on yet. ``roles/<name>/``: what each trained role's trainer saves (weights,
optimizer, schedule, EMA). Frozen roles are loaded from their model again, unless a snapshot changed them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError, boundary, shown
from rlhf.interfaces import Component
from rlhf.saved import refuse, validated
from rlhf.types import Group

from rlhf_runtime.checkpoint import Checkpoint, dumps, read_json, write_json
from rlhf_runtime.checkpoint.json_values import encode
from rlhf_runtime.checkpoint.saved_groups import read_groups, write_groups
from rlhf_runtime.loop.built import Built
from rlhf_runtime.loop.state_fields import SavedState
from rlhf_runtime.workers.returned_values import InvalidResult, check_turns


@dataclass(frozen=True, slots=True)
class State:
    """All of a run after ``step`` finished steps but the weights, as plain values that later steps do not change."""

    step: int
    values: dict[str, Any]
    ready: list[Group]


def stateful(run: Built) -> dict[str, Component]:
    """Every component whose state is in the checkpoint, by a stable name."""
    parts: dict[str, Component] = {"algorithm": run.algorithm}
    parts |= {f"algorithm.{slot}": part for slot, part in run.algorithm.parts.items()}
    parts |= {f"reward.{name}": reward for name, reward in run.rewards.items()}
    return parts | {f"observer.{name}": observer for name, observer in run.observers.items()}


def collect_state(run: Built, step: int) -> State:
    """The state of now, to be written now or, while the weights stay what they are, later."""
    components = {name: component.state_dict() for name, component in stateful(run).items()}
    values: dict[str, Any] = {"step": step, "updates": run.updates, "components": components}
    if run.stream is not None:
        values["stream"] = run.stream.state_dict()
    else:
        values["data"] = run.data.state_dict()
    if run.control.changed:
        values["changed"] = dict(run.control.changed)
    if run.best is not None:
        values["best"] = run.best.state_dict()
    return State(step, encode(values), [g for b in run.stream.ready for g in b.groups] if run.stream else [])


def write_state(run: Built, step: int, folder: Path, state: State | None = None) -> None:
    """Everything that the run needs to go on after ``step`` finished steps as if it had never stopped: the weights of
    now, and ``state``, by default that of now."""
    for name in run.saved_roles:
        path = folder / "roles" / name
        path.mkdir(parents=True)
        run.roles[name].every("save", path)
    state = state or collect_state(run, step)
    if run.stream is not None:
        write_groups(folder / "ready.jsonl", state.ready)
    write_json(folder / "state.json", state.values)


def read_state(run: Built, checkpoint: Checkpoint) -> int:
    """Restore :func:`write_state`. Returns the number of finished steps.

    Raises CheckpointError naming the file and the field that is not what a run saves, or whose state could not be
    restored.
    """
    folder, where = checkpoint.path, checkpoint.path / "state.json"
    state = read_json(where)
    saved_state = validated(SavedState, state, where)
    encode(state, str(where))  # no number in it is NaN or infinite
    if saved_state.step != checkpoint.step:
        refuse(where, f"step: {saved_state.step}, but the checkpoint is of step {checkpoint.step}.")
    wanted = "data" if run.stream is None else "stream"
    if wanted not in state:
        refuse(where, f"{wanted}: missing.")
    for name in run.saved_roles:
        saved_role = folder / "roles" / name
        if name in run.trained_roles or saved_role.is_dir():  # a run of fewer steps may not have come to a snapshot
            run.roles[name].every("load", saved_role)
    saved = {name: own for name, own in state["components"].items() if not name.startswith("observer.")}
    needed = {name: c for name, c in stateful(run).items() if not name.startswith("observer.")}
    if set(needed) != set(saved):
        raise CheckpointError(
            f"the checkpoint {folder} holds the state of {sorted(saved)}, this run has {sorted(needed)}"
        )
    for name, component in stateful(run).items():
        if name in state["components"]:  # an observer may come or go: it changes nothing
            _restore(name, component, state["components"][name], where)
    if run.stream is not None:
        run.stream.load_state_dict(state["stream"], _ready_groups(run, state["stream"], folder / "ready.jsonl"))
    else:
        run.data.load_state_dict(state["data"])
    if run.best is not None and "best" in state:  # evaluation may come or go, too
        run.best.load_state_dict(state["best"])
    run.control.restore(saved_state.changed)
    run.updates = saved_state.updates
    return saved_state.step


def _restore(name: str, component: Component, saved: dict[str, Any], where: Path) -> None:
    """Give a component its state back, and see that it took it: a loader that converts a wrong value says nothing."""
    what = f"load_state_dict() of {name} ({type(component).__name__}), given components.{name} of {where},"
    with boundary(CheckpointError, what):
        component.load_state_dict(saved)
        if name.startswith("observer."):  # changes nothing of the run, and may have a state only once it has started
            return
        taken = encode(component.state_dict(), f"state_dict() of {name}")
    if changed := [key for key in saved if key in taken and dumps(saved[key]) != dumps(taken[key])]:
        key = changed[0]
        refuse(where, f"components.{name}.{key}: {shown(saved[key])}, of which was made {shown(taken[key])}.")


def _ready_groups(run: Built, stream: dict[str, Any], path: Path) -> list[Group]:
    """The groups of the batches that were generated and not trained on yet."""
    groups = read_groups(path, run.data.row)
    told = sum(batch["groups"] for batch in stream["ready"])
    if len(groups) != told:
        refuse(path, f"it has {len(groups)} groups, and state.json counts {told}.")
    for group in groups:
        for trajectory in (t for t in group.trajectories if not t.given):
            try:
                check_turns(trajectory.turns)
            except InvalidResult as error:
                refuse(path, f"group {group.number}, sample {trajectory.index[1]}: {error}.")
    return groups
