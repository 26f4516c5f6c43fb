"""Groups of trajectories in files. They are read back exactly as they were written, with bit-equal floats.

``rollouts/step-000012.arrow`` and the generated, untrained batches of a checkpoint are Arrow files
(:mod:`rlhf_runtime.checkpoint.sample_table`). The files that `rlhf eval`, `generate` and `score` write are JSON lines.
Both contain the same values, one sample per row or line. Of the data row, only source and index are written, because
its columns are in the data. When groups are read, a callback returns the row. The prompt can be written too, for people
and for exports.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from rlhf.errors import CheckpointError, DataError, brief
from rlhf.ops.sample_values import group_number
from rlhf.saved import WAY_OUT
from rlhf.types import ExpertRecord, Group, Image, RewardResult, Row, Trajectory, Turn
from rlhf.types.arrays import FloatArray

from rlhf_runtime.checkpoint.atomic_files import write_atomic
from rlhf_runtime.checkpoint.json_values import encode, loads, to_text
from rlhf_runtime.checkpoint.sample_table import SUFFIX, plain_values, read_samples, write_samples

FindRow = Callable[[str, int], Row]
"""``find(source, index) -> Row``."""
TellPrompt = Callable[[Trajectory], Any]
"""``tell(trajectory) -> prompt``, as text or messages; None if its context is more than the prompt."""
TokenValues = Mapping[tuple[int, int], Mapping[str, FloatArray]]
"""{(``group_number`` of a trajectory, sample): {name: a value for each of its sampled tokens, or one value if all are
equal}}."""


def write_groups(
    path: Path, groups: Iterable[Group], prompt: TellPrompt | None = None, token_values: TokenValues | None = None
) -> None:
    """Write ``groups`` to ``path``: an Arrow file. After a crash the file is complete or absent.

    Args:
        token_values: values that a step computed for the sampled tokens. They are for people: no run reads them.
    """
    values = sample_values(groups, prompt)
    if token_values:
        values = ({**v, "token_values": token_values.get(unit_of(v), {}) if "index" in v else {}} for v in values)
    write_samples(path, values, with_prompts=prompt is not None)


def unit_of(sample: Mapping[str, Any]) -> tuple[int, int]:
    """The columns ``group`` and ``sample`` that a recorded sample has in a batch."""
    number, place = sample["index"]
    return group_number(number, agent_of(sample["turns"])), place


def agent_of(turns: Sequence[Mapping[str, Any]]) -> str:
    """The agent that sampled the turns of a recorded sample."""
    return (turns[0].get("agent") or "") if turns else ""


def write_lines(path: Path, groups: Iterable[Group], prompt: TellPrompt | None = None) -> None:
    """Write ``groups`` to ``path``: JSON lines, one per sample. After a crash the file is complete or absent."""
    write_atomic(path, "".join(f"{line}\n" for line in group_lines(groups, prompt)))


def group_lines(groups: Iterable[Group], prompt: TellPrompt | None = None) -> Iterator[str]:
    """The JSON lines (without line ends) of ``groups``, in order; see :func:`sample_values`."""
    for values in sample_values(groups, prompt):
        turns = [{name: _plain(value) for name, value in turn.items()} for turn in values.get("turns", ())]
        yield _text({**values, "turns": turns} if "turns" in values else values)


def recorded(path: Path, rows: Collection[int] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place in the file, values) of each sample in an Arrow file or in JSON lines.

    Args:
        rows: only these rows or lines, counted from 0.

    Raises CheckpointError for a file that is missing or damaged, naming the line that is not JSON.
    """
    if path.suffix == SUFFIX:
        yield from read_samples(path, rows)
        return
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as cause:
        raise CheckpointError(f"cannot read {path}: {cause}") from cause
    for number, line in enumerate(text.split("\n") if text else [], 1):  # texts may hold other line ends
        if rows is None or number - 1 in rows:
            yield f"{path}:{number}", loads(line, f"{path}:{number}")


def sample_values(groups: Iterable[Group], prompt: TellPrompt | None = None) -> Iterator[dict[str, Any]]:
    """The values of each sample, in order. With ``prompt`` they include the prompt.

    Raises CheckpointError naming the sample if a reward's ``info`` holds a value that JSON cannot represent.
    """
    for group in groups:
        row = {"source": group.row.source, "index": group.row.index}
        if not group.trajectories:
            yield {"group": group.number, "sample": None, "row": row}
        for position, trajectory in enumerate(group.trajectories):
            if (trajectory.row.source, trajectory.row.index) != (group.row.source, group.row.index):
                raise CheckpointError(
                    f"group {group.number}: sample {position} belongs to a different row than its group"
                )
            values = {"group": group.number, "sample": position, "row": row, **_trajectory_out(trajectory)}
            yield values if prompt is None else {**values, "prompt": prompt(trajectory)}


def read_groups(path: Path, find: FindRow) -> list[Group]:
    """The groups that :func:`write_groups` wrote.

    Args:
        find: gives the row of a source at an index, with all its columns.

    Raises CheckpointError for a missing or damaged file, naming the row that is no sample.
    """
    groups: list[Group] = []
    for place, line in read_samples(path):
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
                    f"{len(group.trajectories)} of group {group.number}. A row is missing."
                )
            if (line["row"]["source"], line["row"]["index"]) != (group.row.source, group.row.index):
                raise CheckpointError(
                    f"{place} belongs to a different row of the data than the samples before it. {WAY_OUT}"
                )
            group.trajectories.append(_trajectory_in(line, group.row))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, DataError) as cause:
            raise CheckpointError(f"{place} is not a sample: {type(cause).__name__}: {cause}. {WAY_OUT}") from cause
    return groups


# Fields are taken from the dataclasses, so a new field is saved without a change here. Only nested fields, and fields
# that JSON turns into lists, are named.


def _trajectory_out(trajectory: Trajectory) -> dict[str, Any]:
    out = {name: getattr(trajectory, name) for name in _names(Trajectory) if name != "row"}
    out["turns"] = [_turn_out(turn) for turn in trajectory.turns]
    out["rewards"] = {name: _reward_out(result, name, trajectory) for name, result in trajectory.rewards.items()}
    return out


def _turn_out(turn: Turn) -> dict[str, Any]:
    out = {name: getattr(turn, name) for name in _names(Turn)}
    out["images"] = [
        {"data": b64encode(i.data).decode(), "at": i.start, "tokens": i.tokens, "short": i.short.tolist()}
        for i in turn.images
    ]
    if turn.experts is not None:
        out["experts"] = {**asdict(turn.experts), "choices": b64encode(turn.experts.choices).decode()}
    return out


def _experts_in(values: dict[str, Any] | None) -> ExpertRecord | None:
    if values is None:
        return None
    for name in ("layers", "experts", "chosen"):
        _require_type(values[name], int, f"experts.{name}")
    return ExpertRecord(**{**values, "choices": b64decode(values["choices"], validate=True)})


def _images_in(images: Sequence[dict[str, Any]]) -> tuple[Image, ...]:
    for image in images:
        for name in ("at", "tokens"):
            _require_type(image[name], int, f"images.{name}")
    return tuple(
        Image(b64decode(image["data"], validate=True), image["at"], image["tokens"], image["short"]) for image in images
    )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, array) else value


def _reward_out(result: RewardResult, name: str, trajectory: Trajectory) -> dict[str, Any]:
    label = f"sample {trajectory.index}: info of reward {name!r}"
    out = {name: getattr(result, name) for name in _names(RewardResult)}
    return {**out, "info": encode(result.info, label, nonfinite="mark")}


def _trajectory_in(line: dict[str, Any], row: Row) -> Trajectory:
    values = {name: line[name] for name in _names(Trajectory) if name != "row"}
    turns = [
        Turn(**{**{name: turn[name] for name in _names(Turn) if name in turn}, "versions": _tuples(turn["versions"]),
                "images": _images_in(turn["images"]), "messages": _tuples(turn.get("messages", ())),
                "experts": _experts_in(turn.get("experts"))})
        for turn in line["turns"]
    ]  # fmt: skip
    rewards = {
        name: RewardResult(**{**{name: r[name] for name in _names(RewardResult)}, "steps": _tuples(r["steps"])})
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
    for name in _names(kind):
        if name not in ("row", "turns", "rewards", "ids", "logprobs", "images", "experts"):  # built by the caller
            _require_type(getattr(part, name), hints[name], name)


def _require_type(value: Any, hint: Any, name: str) -> None:
    try:
        _adapter(hint).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join([name, *map(str, first["loc"])])
        raise TypeError(f"{field}: {str(first['msg']).removeprefix('Input ')}, got {brief(first['input'])}") from None


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    # Otherwise pydantic would accept text for a number and 1 for True.
    return TypeAdapter(hint, config=ConfigDict(strict=True))


def _tuples(values: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(v) for v in values)


def _text(line: dict[str, Any]) -> str:
    try:
        # Fast encoding in C for the long lists of tokens and log-probs; only infinities (rare) need the slow encoder.
        return to_text(line)
    except (ValueError, TypeError):
        marked = encode(plain_values(line), f"group {line['group']}, sample {line['sample']}", nonfinite="mark")
        return to_text(marked)
