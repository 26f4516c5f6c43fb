"""What a checkpoint of a run holds, written and read in one place.

``state.json``: step, stream counters, state of algorithm, parts, rewards, observers, best metric. ``ready.jsonl``: the
generated batches that were not trained on yet. ``roles/<name>/``: what each trained role's trainer saves (weights,
optimizer, schedule, EMA). Frozen roles are loaded from their model again, unless a snapshot changed them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.checkpoint import read_json, write_json
from rlhf.checkpoint.json_values import encode
from rlhf.controller.built import Built
from rlhf.errors import CheckpointError
from rlhf.interfaces import Component
from rlhf.serialise import read_groups, write_groups
from rlhf.types import Group


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


def read_state(run: Built, folder: Path) -> int:
    """Restore :func:`write_state`. Returns the number of finished steps."""
    state = read_json(folder / "state.json")
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
            component.load_state_dict(state["components"][name])
    if run.stream is not None:
        run.stream.load_state_dict(state["stream"], read_groups(folder / "ready.jsonl", run.data.row))
    else:
        run.data.load_state_dict(state["data"])
    if run.best is not None and "best" in state:  # evaluation may come or go, too
        run.best.load_state_dict(state["best"])
    run.updates = int(state["updates"])
    return int(state["step"])
