"""Rows of data, as read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol


class RowLayout(Protocol):
    """How the fields of a row are read from the columns of its source."""

    def read(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """{field: value} of a row with these columns."""

    def name(self, field: str) -> str:
        """Name of the column that holds ``field``, for messages."""


@dataclass(frozen=True, slots=True)
class ReadFields:
    """A layout for a single row whose fields were read before."""

    fields: Mapping[str, Any]

    def read(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self.fields)

    def name(self, field: str) -> str:
        return field


class Columns(dict[str, Any]):
    """The columns of a row by name. A dotted name that is not a column, such as ``reward_model.ground_truth``, refers
    to a value inside a column that holds a table, or a table as JSON text. The KeyError for a missing column lists the
    existing columns."""

    def __missing__(self, name: str) -> Any:
        table, key = self._place(name)
        if key in table:
            return table[key]
        place = "columns present" if table is self else f"{name[: -len(key) - 1]!r} holds"
        raise KeyError(f"no column {name!r}; {place}: {', '.join(map(str, table)) or 'none'}")

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        table, key = self._place(str(name))
        return table is not self and key in table

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def _place(self, name: str) -> tuple[Mapping[str, Any], str]:
        """The innermost table on the way to a dotted name, and the rest of the name."""
        table: Mapping[str, Any] = self
        while "." in name:
            first, _, rest = name.partition(".")
            inner = table.get(first)
            if isinstance(inner, str) and inner.startswith("{"):
                with suppress(ValueError, RecursionError):
                    inner = json.loads(inner)
            if not isinstance(inner, Mapping):
                break
            table, name = inner, rest
        return table, name


@dataclass(frozen=True, slots=True)
class Row:
    """One data row with all its columns, as read. Rewards and environments see every column."""

    columns: Mapping[str, Any]
    """A mapping of another type is copied to :class:`Columns`."""
    source: str
    """Name of the source in the run file; per-source metrics use it."""
    index: int
    """Position in that source, from 0; ``(source, index)`` identifies the row across a resume."""
    layout: RowLayout | None = field(default=None, compare=False, repr=False)
    """How the columns of its source are read, if they differ from those that the run file names."""

    def __post_init__(self) -> None:
        if not isinstance(self.columns, Columns):
            object.__setattr__(self, "columns", Columns(self.columns))

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def get(self, name: str, default: Any = None) -> Any:
        return self.columns.get(name, default)
