"""Recorded samples as an Arrow file. Each row is a sample with its turns.

``pandas.read_feather``, ``pyarrow.feather.read_table`` and ``datasets.load_dataset("arrow", ...)`` read such a file.
Tokens and log-probs are written as arrays, so a file is hardly larger than their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rlhf.errors import CheckpointError
from rlhf.saved import WAY_OUT

from rlhf_runtime.checkpoint.atomic_files import replace_file
from rlhf_runtime.checkpoint.json_values import dumps, encode, loads, to_text, unmark

IMAGE = pa.struct(
    {
        "data": pa.string(),  # base64
        "at": pa.int64(),
        "tokens": pa.int64(),
        "short": pa.list_(pa.int32()),
    }
)
EXPERTS = pa.struct(
    {
        "choices": pa.large_string(),  # base64
        "layers": pa.int64(),
        "experts": pa.int64(),
        "chosen": pa.int64(),
    }
)
TURN = pa.struct(
    {
        "ids": pa.list_(pa.int32()),
        "sampled": pa.bool_(),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.list_(pa.int64())),
        "finish": pa.string(),
        "temperature": pa.float64(),
        "reward": pa.float64(),
        "text": pa.string(),
        "fresh": pa.bool_(),
        "is_demonstration": pa.bool_(),
        "images": pa.list_(IMAGE),
        "score": pa.float64(),
        "messages": pa.list_(pa.list_(pa.string())),
        "experts": EXPERTS,
        "agent": pa.string(),
    }
)
STEP = pa.struct({"turn": pa.int64(), "token": pa.int64(), "value": pa.float64()})
REWARD = pa.struct(
    {
        "name": pa.string(),
        "value": pa.float64(),
        "score": pa.float64(),
        "steps": pa.list_(STEP),
        "info": pa.string(),  # JSON
    }
)
TOKEN_VALUES = pa.struct({"name": pa.string(), "values": pa.list_(pa.float32())})
SCHEMA = pa.schema(
    {
        "group": pa.int64(),
        "sample": pa.int64(),  # null: the group has no sample
        "source": pa.string(),
        "row": pa.int64(),
        "index": pa.list_(pa.int64()),
        "status": pa.string(),
        "error": pa.string(),
        "info": pa.string(),  # JSON
        "reward": pa.float64(),
        "score": pa.float64(),
        "prompt": pa.string(),
        "messages": pa.string(),  # JSON, if the prompt is messages
        "turns": pa.list_(TURN),
        "rewards": pa.list_(REWARD),
        "token_values": pa.list_(TOKEN_VALUES),  # of the sampled tokens, in order; one value: all are equal
        "exact": pa.string(),  # the sample as JSON, if UTF-8 cannot represent one of its texts
    }
)
NO_PROMPTS = {b"prompts": b"none"}
"""Metadata of a file that does not hold the prompts of its samples."""
SUFFIX = ".arrow"
AT_ONCE = 2**18
"""Tokens that are written as one batch of rows, so that a file needs little memory."""
IMAGES_AT_ONCE = 2**26
"""The same for images, in bytes. A column of a batch can hold 2 GiB of them."""


def load_writer() -> None:
    """Import the libraries that writing needs. pyarrow imports pandas, if it is installed, when it first converts a
    list to an array. A run calls this at its start, so that the time of the first step does not include the import."""
    pa.array([0])


def write_samples(path: Path, samples: Iterable[Mapping[str, Any]], with_prompts: bool) -> None:
    """Write samples in the form of ``saved_groups.sample_values``. After a crash the file is complete or absent.

    Args:
        with_prompts: whether the samples have ``prompt``.
    """
    schema = SCHEMA.with_metadata(None if with_prompts else NO_PROMPTS)

    def write(file: Any) -> None:
        with pa.ipc.new_file(file, schema) as writer:
            for batch in _batches(samples):
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))

    replace_file(path, write)


def read_samples(path: Path, rows: Collection[int] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place in the file, sample) of each row; ``ids`` and ``logprobs`` are numpy arrays.

    Args:
        rows: read only these rows, counted from 0.

    Raises CheckpointError for a file that is missing, damaged or not of samples.
    """
    try:
        with pa.OSFile(str(path)) as file:
            reader = pa.ipc.open_file(file)
            if not reader.schema.equals(SCHEMA):
                raise CheckpointError(f"{path} does not hold samples: {_differing(reader.schema)}. {WAY_OUT}")
            number = 0
            for position in range(reader.num_record_batches):
                batch = reader.get_batch(position)
                # Arrow trusts offsets and texts that it reads. In a damaged file they may point outside of the memory.
                batch.validate(full=True)
                places: Sequence[int] = range(number, number + batch.num_rows)
                number += batch.num_rows
                if rows is not None:
                    places = [place for place in places if place in rows]
                    batch = batch.take(pa.array([place - number + batch.num_rows for place in places], pa.int64()))
                for place, values in zip(places, _values(batch), strict=True):
                    location = f"{path}, row {place + 1}"
                    exact = values.pop("exact")
                    if exact is not None:
                        yield location, loads(exact, location)
                        continue
                    values["info"] = loads(values["info"] or "{}", location)
                    for reward in (values["rewards"] or {}).values():
                        reward["info"] = loads(reward["info"], location)
                    if reader.schema.metadata == NO_PROMPTS:
                        del values["prompt"]
                    yield location, values
    except (OSError, pa.ArrowException) as cause:
        raise CheckpointError(f"cannot read {path}: {cause}") from cause


def read_columns(path: Path, names: list[str]) -> dict[str, list[Any]]:
    """Some columns of all rows. This is fast for columns with short values.

    Raises CheckpointError for a file that is missing, damaged or without such columns.
    """
    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
            return {name: table.column(name).to_pylist() for name in names}
    except (OSError, pa.ArrowException, KeyError, UnicodeDecodeError) as cause:
        raise CheckpointError(f"cannot read {path}: {cause}") from cause


def _differing(schema: pa.Schema) -> str:
    """A text that says which column differs from :data:`SCHEMA`."""
    names = sorted({*schema.names, *SCHEMA.names})
    wrong = next((n for n in names if schema.names.count(n) != SCHEMA.names.count(n)
                  or schema.field(n).type != SCHEMA.field(n).type), "")  # fmt: skip
    if wrong not in schema.names:
        return f"the column {wrong!r} is missing" if wrong else f"its columns are in the order {schema.names}"
    if wrong not in SCHEMA.names:
        return f"the column {wrong!r} is not one of {SCHEMA.names}"
    return f"the column {wrong!r} is of type {schema.field(wrong).type}; allowed: {SCHEMA.field(wrong).type}"


def _batches(samples: Iterable[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
    rows: list[Mapping[str, Any]] = []
    tokens = image_bytes = 0
    for sample in samples:
        rows.append(sample)
        turns = sample.get("turns", ())
        tokens += sum(len(turn["ids"]) for turn in turns)
        image_bytes += sum(len(image["data"]) for turn in turns for image in turn["images"])
        if tokens >= AT_ONCE or image_bytes >= IMAGES_AT_ONCE:
            yield _batch(rows)
            rows, tokens, image_bytes = [], 0, 0
    if rows:
        yield _batch(rows)


def _batch(samples: list[Mapping[str, Any]]) -> pa.RecordBatch:
    rows = [_row(sample) for sample in samples]
    try:
        return _record_batch(rows)
    except UnicodeEncodeError:  # half of a surrogate pair, which models do sample
        return _record_batch([_with_exact(row, sample) for row, sample in zip(rows, samples, strict=True)])


def _row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the columns; ``turns`` as they are."""
    prompt = sample.get("prompt")
    prompt_columns = {"messages": dumps(prompt), "prompt": None} if isinstance(prompt, list) else {"prompt": prompt}
    rewards = [
        {**result, "name": name, "info": to_text(result["info"]),
         "steps": [dict(zip(("turn", "token", "value"), step, strict=True)) for step in result["steps"]]}
        for name, result in sample.get("rewards", {}).items()
    ]  # fmt: skip
    plain = {"source": sample["row"]["source"], "row": sample["row"]["index"], "rewards": rewards}
    values = [{"name": name, "values": values} for name, values in sample.get("token_values", {}).items()]
    info = to_text(sample["info"]) if "info" in sample else None
    return {**sample, **prompt_columns, **plain, "token_values": values, "info": info}


def _with_exact(row: dict[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
    plain = encode(plain_values(sample), "sample", nonfinite="mark")
    try:
        json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()
        return row
    except UnicodeEncodeError:
        return {**_escaped(row), "exact": to_text(plain)}


def plain_values(value: Any) -> Any:
    """``value`` with arrays converted to lists, and without marks: a reward's info has them already, and :func:`encode`
    refuses them."""
    if isinstance(value, Mapping):
        return unmark({key: plain_values(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _escaped(value: Any) -> Any:
    """``value`` with texts that UTF-8 can represent."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list | tuple) else value


def _record_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    columns = {f.name: pa.array([r.get(f.name) for r in rows], f.type) for f in SCHEMA if f.name != "turns"}
    turns = [turn for row in rows for turn in row.get("turns", ())]
    fields = {f.name: pa.array([t[f.name] for t in turns], f.type) for f in TURN if f.name not in ("ids", "logprobs")}
    # Copied as bytes: pa.array() would make a Python number of every token.
    fields["ids"] = _lists([turn["ids"] for turn in turns], "i")
    fields["logprobs"] = _lists([turn["logprobs"] for turn in turns], "f")
    nested = pa.StructArray.from_arrays([fields[f.name] for f in TURN], fields=list(TURN))
    columns["turns"] = pa.ListArray.from_arrays(_offsets(len(row.get("turns", ())) for row in rows), nested)
    return pa.record_batch([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _lists(arrays: list[Any], kind: str) -> pa.ListArray:
    """Arrays of numbers as lists of an Arrow column; None stays none."""
    values = pa.array(np.frombuffer(b"".join(a for a in arrays if a is not None), kind))
    offsets = _offsets(0 if a is None else len(a) for a in arrays)
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array([a is None for a in arrays], pa.bool_()))


def _offsets(counts: Iterable[int]) -> pa.Array:
    return pa.array([0, *accumulate(counts)], pa.int32())


def _values(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    arrays = ("turns", "token_values")
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if name not in arrays}
    columns["token_values"] = _token_values(batch.column("token_values"))
    lists = batch.column("turns")
    turns = _turns(lists.values)
    ends = lists.offsets.to_pylist()
    for number in range(batch.num_rows):
        row = {name: values[number] for name, values in columns.items()}
        row["row"] = {"source": row.pop("source"), "index": row["row"]}
        messages = row.pop("messages")
        row["prompt"] = row["prompt"] if messages is None else loads(messages)
        row["turns"] = turns[ends[number] : ends[number + 1]] if lists[number].is_valid else None
        if row["rewards"] is not None:
            row["rewards"] = {reward.pop("name"): _with_steps(reward) for reward in row["rewards"]}
        yield row


def _token_values(lists: pa.ListArray) -> list[dict[str, Any]]:
    """{name: numpy array} of each row."""
    names, numbers = lists.values.field("name").to_pylist(), lists.values.field("values")
    ends, offsets, values = lists.offsets.to_pylist(), numbers.offsets.to_pylist(), numbers.values.to_numpy()
    return [
        {names[n]: values[offsets[n] : offsets[n + 1]] for n in range(first, last)} for first, last in pairwise(ends)
    ]


def _with_steps(reward: dict[str, Any]) -> dict[str, Any]:
    steps = reward["steps"]
    return {**reward, "steps": None if steps is None else [tuple(step.values()) for step in steps]}


def _turns(nested: pa.StructArray) -> list[dict[str, Any]]:
    columns: dict[str, list[Any]] = {}
    for field in nested.type:
        column = nested.field(field.name)
        if field.name in ("ids", "logprobs"):
            values, ends = column.values.to_numpy(), column.offsets.to_pylist()
            valid = column.is_valid().to_pylist()
            columns[field.name] = [values[ends[i] : ends[i + 1]] if ok else None for i, ok in enumerate(valid)]
        else:
            columns[field.name] = column.to_pylist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
