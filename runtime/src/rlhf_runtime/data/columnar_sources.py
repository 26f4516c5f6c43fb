"""Columnar sources, read with pyarrow and ``datasets``: parquet, arrow, folders saved by ``datasets``."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import DataError, did_you_mean

from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.data.sources import Source


class TableSource(Source):
    """A pyarrow table, in memory or memory-mapped.

    Args:
        dataset: the ``datasets.Dataset`` of the table, whose features decode rows.
    """

    def __init__(self, section: SourceSection, table: Any, dataset: Any = None) -> None:
        self._table, self._dataset = table, dataset
        super().__init__(section, list(table.column_names), content_hash(table))

    def rows(self) -> int:
        return int(self._table.num_rows)

    def read(self, index: int) -> dict[str, Any]:
        row = self._table.slice(index, 1).to_pylist()[0] if self._dataset is None else self._dataset[index]
        return row_of_table(row)

    def values(self, column: str) -> Iterator[Any]:
        if column not in self.columns:  # of another file of the same source
            return itertools.repeat(None, len(self))
        return iter(self._table.column(column).slice(0, len(self)).to_pylist())


def row_of_table(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """A row of a table, without the nulls that the table added (:func:`without_added_nulls`)."""
    return {column: without_added_nulls(value) for column, value in row.items()}


def without_added_nulls(value: Any) -> Any:
    """A value whose messages, turns and tools have no null fields, at any depth.

    In a table every row has the fields of all rows, so the table adds the arguments of one tool, as null, to the calls
    of another. An argument whose real value is null is removed with them. To keep it, store arguments as JSON text.
    """
    if isinstance(value, dict):
        return {key: without_added_nulls(inner) for key, inner in value.items()}
    if not isinstance(value, list) or not value or not isinstance(value[0], dict | list):
        return value
    keys = value[0].keys() if isinstance(value[0], dict) else set()
    return [*map(_without_nulls if any(keys >= fields for fields in _UNITED) else without_added_nulls, value)]


_UNITED = ({"role"}, {"from", "value"}, {"function"}, {"name", "parameters"})
"""Fields of messages, of turns, of tools in the form of the chat API, and of tools without its outer object."""


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def with_stored_media(dataset: Any) -> Any:
    """The dataset with columns of images, audio and video in their stored form ``{bytes, path}``. To decode audio and
    video, ``datasets`` needs further packages, also if nothing reads these columns."""
    import datasets

    def stored(feature: Any) -> Any:
        if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
            return dataclasses.replace(feature, decode=False)
        if isinstance(feature, datasets.List):
            return datasets.List(stored(feature.feature), length=feature.length)
        return feature

    for name, feature in dataset.features.items():
        if (undecoded := stored(feature)) != feature:
            dataset = copy.deepcopy(dataset)
            dataset._info.features[name] = undecoded
    return dataset


def content_hash(table: Any) -> str:
    """SHA-256 of the values of a pyarrow table. It does not depend on chunks or on the storage format."""
    import pyarrow as pa

    digest = hashlib.sha256(str(table.schema.remove_metadata()).encode())
    for start in range(0, table.num_rows, 8192):
        # take() copies the rows, so equal values give equal bytes, regardless of offsets and chunks.
        part = table.slice(start, 8192).combine_chunks()
        part = part.take(pa.array(range(part.num_rows))).replace_schema_metadata(None)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part)
        digest.update(sink.getvalue())
    return digest.hexdigest()


def read_table(path: Path, kind: str) -> Any:
    """A parquet file, or an arrow file in stream or file format."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        if kind == "parquet":
            return _without_views(pa.parquet.read_table(path))
        content = pa.memory_map(str(path))
        try:
            return _without_views(pa.ipc.open_stream(content).read_all())
        except pa.ArrowInvalid:
            return _without_views(pa.ipc.open_file(pa.memory_map(str(path))).read_all())
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path} as {kind}: {error}") from None


def _without_views(table: Any) -> Any:
    """The same table with string views (which polars writes to arrow files) as plain strings, because not all functions
    of pyarrow accept views."""
    import pyarrow as pa

    def plain(kind: Any) -> Any:
        if kind in (pa.string_view(), pa.binary_view()):
            return pa.large_string() if kind == pa.string_view() else pa.large_binary()
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return (pa.list_ if pa.types.is_list(kind) else pa.large_list)(plain(kind.value_type))
        if pa.types.is_struct(kind):
            return pa.struct([pa.field(f.name, plain(f.type), f.nullable) for f in kind])
        return kind

    for number, field in enumerate(table.schema):
        if (kind := plain(field.type)) != field.type:
            table = table.set_column(number, field.name, table.column(number).cast(kind))
    return table


def saved_source(path: Path, section: SourceSection) -> TableSource:
    """A folder written by ``save_to_disk``: a dataset, or the ``split`` of a dictionary of datasets."""
    import datasets

    if section.subset is not None:
        raise DataError(f"{path}: subset = {section.subset!r}, but a saved folder has no subsets")
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # of many classes; each means that this folder cannot be read
        raise DataError(f"cannot load {path} with datasets.load_from_disk: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if section.split not in dataset:
            raise DataError(
                f"{path} has no split {section.split!r}; it has {', '.join(dataset)}."
                f"{did_you_mean(section.split, dataset)}"
            )
        dataset = dataset[section.split]
    elif section.split != "train":
        raise DataError(f"{path}: split = {section.split!r}, but the folder holds a single dataset without splits")
    flat = dataset.flatten_indices(keep_in_memory=True) if dataset._indices is not None else dataset
    stored = with_stored_media(flat)
    return TableSource(section, stored.data.table, stored)
