"""Groups of trajectories as JSON lines, exact: what is read back equals what was written, floats bit for bit.

One line a sample, so that ``rollouts/step-000012.jsonl`` can be read by people and by ``jq``; the same lines keep
generated, untrained batches in a checkpoint. A row is written as its source and index, since its columns are in
the data already; reading asks a callback for it. For people and for exports the prompt may be written too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from rlhf.errors import CheckpointError, DataError, shown
from rlhf.saved import WAY_OUT
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn

from rlhf_runtime.checkpoint.atomic_files import write_atomic
from rlhf_runtime.checkpoint.json_values import encode, loads, to_text

FindRow = Callable[[str, int], Row]
"""``find(source, index) -> Row``."""
TellPrompt = Callable[[Trajectory], Any]
"""``tell(trajectory) -> its prompt, as text or messages; None where its context is not that alone``."""


def write_groups(path: Path, groups: Iterable[Group], prompt: TellPrompt | None = None) -> None:
    """Write ``groups`` to ``path``, one line a sample; after a crash the file is whole or absent."""
    write_atomic(path, "".join(f"{line}\n" for line in group_lines(groups, prompt)))


def read_groups(path: Path, find: FindRow) -> list[Group]:
    """The groups that :func:`write_groups` wrote. Raises CheckpointError for a missing or damaged file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise CheckpointError(f"cannot read {path}: {cause}") from cause
    if text and not text.endswith("\n"):
        raise CheckpointError(f"{path} ends in the middle of a line")
    return groups_from_lines(text.split("\n")[:-1], find, str(path))


def group_lines(groups: Iterable[Group], prompt: TellPrompt | None = None) -> Iterator[str]:
    """The JSON lines (without line ends) of ``groups``, in order; with ``prompt`` each says what it was asked.

    Raises CheckpointError naming the sample where a reward's ``info`` holds something that is not JSON.
    """
    for group in groups:
        row = {"source": group.row.source, "index": group.row.index}
        if not group.trajectories:
            yield _text({"group": group.number, "sample": None, "row": row})
        for position, trajectory in enumerate(group.trajectories):
            if (trajectory.row.source, trajectory.row.index) != (group.row.source, group.row.index):
                raise CheckpointError(f"group {group.number}: sample {position} is of another row than its group")
            line = {"group": group.number, "sample": position, "row": row, **_trajectory_out(trajectory)}
            yield _text(line if prompt is None else {**line, "prompt": prompt(trajectory)})


def groups_from_lines(lines: Iterable[str], find: FindRow, where: str = "rollouts") -> list[Group]:
    """The groups that :func:`group_lines` was given.

    Args:
        find: gives the row of a source at an index, with all its columns.
        where: the file's name, for messages.

    Raises CheckpointError naming the line that is damaged.
    """
    groups: list[Group] = []
    for number, text in enumerate(lines, 1):
        place = f"{where}:{number}"
        line = loads(text, place)
        try:
            _require_type(line["row"]["index"], int, "row.index")
            _require_type(line["group"], int, "group")
            if line["sample"] in (0, None):
                row = find(line["row"]["source"], line["row"]["index"])
                groups.append(Group(row, line["group"], []))
            if line["sample"] is None:
                continue
            group = groups[-1]
            if (group.number, len(group.trajectories)) != (line["group"], line["sample"]):
                raise CheckpointError(
                    f"{place} is sample {line['sample']} of group {line['group']}; expected sample "
                    f"{len(group.trajectories)} of group {group.number}. A line is missing."
                )
            if (line["row"]["source"], line["row"]["index"]) != (group.row.source, group.row.index):
                raise CheckpointError(f"{place} is of another row than the samples before it. {WAY_OUT}")
            group.trajectories.append(_trajectory_in(line, group.row))
        except (KeyError, IndexError, TypeError, AttributeError, DataError) as cause:
            raise CheckpointError(f"{place} is not a sample: {type(cause).__name__}: {cause}. {WAY_OUT}") from cause
    return groups


# Fields are listed by the dataclasses themselves, so that one added there is saved without a change here; only
# what JSON turns into lists or what is nested is named.


def _trajectory_out(trajectory: Trajectory) -> dict[str, Any]:
    out = {f.name: getattr(trajectory, f.name) for f in fields(Trajectory) if f.name != "row"}
    out["turns"] = [{f.name: getattr(turn, f.name) for f in fields(Turn)} for turn in trajectory.turns]
    out["rewards"] = {name: _reward_out(result, name, trajectory) for name, result in trajectory.rewards.items()}
    return out


def _reward_out(result: RewardResult, name: str, trajectory: Trajectory) -> dict[str, Any]:
    where = f"sample {trajectory.index}: info of reward {name!r}"
    out = {f.name: getattr(result, f.name) for f in fields(RewardResult)}
    return {**out, "info": encode(result.info, where, nonfinite="mark")}


def _trajectory_in(line: dict[str, Any], row: Row) -> Trajectory:
    values = {f.name: line[f.name] for f in fields(Trajectory) if f.name != "row"}
    turns = [
        Turn(
            **{**{f.name: turn[f.name] for f in fields(Turn) if f.name in turn}, "versions": _tuples(turn["versions"])}
        )
        for turn in line["turns"]
    ]
    rewards = {
        name: RewardResult(**{**{f.name: r[f.name] for f in fields(RewardResult)}, "steps": _tuples(r["steps"])})
        for name, r in line["rewards"].items()
    }
    index = tuple(line["index"])
    trajectory = Trajectory(**{**values, "row": row, "turns": turns, "rewards": rewards, "index": index})
    parts: list[Any] = [*turns, *rewards.values(), trajectory]
    for part in parts:
        _check_fields(part)
    return trajectory


def _check_fields(part: Any) -> None:
    """Raises TypeError naming a field whose value is not of the type that the dataclass gives it."""
    kind: Any = type(part)
    hints = _hints(kind)
    for field in fields(part):
        if field.name not in ("row", "turns", "rewards"):  # made here
            _require_type(getattr(part, field.name), hints[field.name], field.name)


def _require_type(value: Any, hint: Any, name: str) -> None:
    try:
        _adapter(hint).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join([name, *map(str, first["loc"])])
        raise TypeError(f"{at}: {str(first['msg']).removeprefix('Input ')}, got {shown(first['input'])}") from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(strict=True))


def _tuples(values: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(v) for v in values)


def _text(line: dict[str, Any]) -> str:
    try:
        # C speed for the long lists of tokens and log-probs; only the rare infinity takes the slow road.
        return to_text(line)
    except (ValueError, TypeError):
        marked = encode(line, f"group {line['group']}, sample {line['sample']}", nonfinite="mark")
        return to_text(marked)
