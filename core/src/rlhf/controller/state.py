"""What a checkpoint of a run holds, written and read in one place.

``state.json``: step, stream counters, state of algorithm, parts, rewards, observers, best metric. ``ready.jsonl``: the
generated batches that were not trained on yet. ``roles/<name>/``: what each trained role's trainer saves (weights,
optimizer, schedule, EMA). Frozen roles are loaded from their model again, unless a snapshot changed them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.checkpoint import read_json, write_json
from rlhf.errors import CheckpointError
from rlhf.serialise import read_groups, write_groups

if TYPE_CHECKING:
    from rlhf.controller.run import Run


def write_state(run: Run, step: int, folder: Path) -> None:
    """Everything that the run needs to go on after ``step`` finished steps as if it had never stopped."""
    for name in run.saved_roles:
        path = folder / "roles" / name
        path.mkdir(parents=True)
        run.roles[name].every("save", path)
    components = {name: component.state_dict() for name, component in run.stateful().items()}
    state: dict[str, Any] = {"step": step, "updates": run.updates, "components": components}
    if run.stream is not None:
        state["stream"] = run.stream.state_dict()
        write_groups(folder / "ready.jsonl", [g for b in run.stream.ready for g in b.groups])
    else:
        state["data"] = run.data.state_dict()
    if run.best is not None:
        state["best"] = run.best.state_dict()
    write_json(folder / "state.json", state)


def read_state(run: Run, folder: Path) -> int:
    """Restore :func:`write_state`. Returns the number of finished steps."""
    state = read_json(folder / "state.json")
    for name in run.saved_roles:
        run.roles[name].every("load", folder / "roles" / name)
    saved = {name: own for name, own in state["components"].items() if not name.startswith("observer.")}
    needed = {name: c for name, c in run.stateful().items() if not name.startswith("observer.")}
    if set(needed) != set(saved):
        raise CheckpointError(
            f"the checkpoint {folder} holds the state of {sorted(saved)}, this run has {sorted(needed)}"
        )
    for name, component in run.stateful().items():
        if name in state["components"]:  # an observer may come or go: it changes nothing
            component.load_state_dict(state["components"][name])
    if run.stream is not None:
        run.stream.load_state_dict(state["stream"], read_groups(folder / "ready.jsonl", run.data.row))
    else:
        run.data.load_state_dict(state["data"])
    if run.best is not None:
        run.best.load_state_dict(state["best"])
    run.updates = int(state["updates"])
    return int(state["step"])
