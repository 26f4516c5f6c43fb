"""Data sources: rows with a name, columns, a fingerprint, the file and line of each row, and the layout of the columns.

Nothing is cached on disk, and types are not guessed: a ``csv`` cell is text, and a blank line is not a row. A file that
changed between two runs has another fingerprint.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.types import Row

from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data import conversions as convert
from rlhf_runtime.data.labelled_steps import STEP_CONVERSIONS

DEFAULTS: Mapping[str, str] = {
    "prompt": "prompt", "response": "response", "chosen": "chosen", "rejected": "rejected", "label": "label",
    "steps": "completions", "step_labels": "labels", "images": "images",
}  # fmt: skip
"""{field of the run file's [data]: its default column}. The default is used if the run file names no column and the
source has it."""

TOOLS = "tools"
"""The column with descriptions of functions that the chat template shows, and its field. No option changes the
column."""

CONVERSIONS = {**convert.CONVERSIONS, **STEP_CONVERSIONS}
"""{name of a conversion: (words for messages, function)}, of conversations, comparisons and labelled steps."""

ONE_IMAGE = "image"
"""The column of images in many published datasets that have no column ``images``."""

FIELDS = (*DEFAULTS, "messages", "reasoning", "margin", "preference")
"""Fields of ``[data]`` that name columns."""


def named_columns(section: DataSection) -> dict[str, str]:
    """{field: column} as the run file names them."""
    return {f: c for f in FIELDS if (c := getattr(section, f)) is not None}


@dataclass(frozen=True)
class SourceLayout:
    """How the rows of a source are read: {field: column}, then a conversion of the values in these columns."""

    columns: Mapping[str, str]
    conversion: str = ""
    """A name in :data:`CONVERSIONS`; empty: values are not converted."""
    chat: bool = False
    """Whether a chat template is used. Some conversions then make messages."""
    full_conversations: bool = False
    """Whether the answers of a pair may be whole conversations. This is decided for each row. Then the run file names
    no prompt."""
    explicit: bool = field(default=True, compare=False)
    """Whether every column is named by the run file or has its default name. Such a layout is not reported."""
    folder: Path | None = field(default=None, compare=False)
    """Paths of images are relative to this folder."""

    def read(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """{field: value} of a row. Columns that the row lacks are left out. Raises DataError if the conversion
        fails."""
        values = {f: columns[c] for f, c in self.columns.items() if c in columns}
        if self.chat:
            values |= {f: convert.conversation(values[f]) for f in ("messages", "prompt") if f in values}
            values |= {f: convert.answer(values[f]) for f in ("chosen", "rejected", "response") if f in values}
        values = convert.without_repeated_prompt(values) if self.full_conversations else values
        return CONVERSIONS[self.conversion][1](values, self.chat) if self.conversion else values

    def name(self, field: str) -> str:
        """The column of a field, for messages; several columns if a conversion makes the field from several."""
        return self.columns.get(field) or (
            ", ".join(self.columns.values()) if self.conversion else DEFAULTS.get(field, field)
        )

    def __str__(self) -> str:
        conversion = f" ({CONVERSIONS[self.conversion][0]})" if self.conversion else ""
        return ", ".join(f if f == c else f"{f} = {c!r}" for f, c in self.columns.items()) + conversion


class Source(ABC):
    """Rows by index, read on demand."""

    def __init__(self, section: SourceSection, columns: list[str], fingerprint: str) -> None:
        self.section = section
        self.name = section.label
        self.columns = columns
        """All columns that occur in any row."""
        content = f"{fingerprint} {section.max_rows}"
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        """SHA-256 (hexadecimal) of the content. Equal data has an equal fingerprint."""
        self.layout: SourceLayout | None = None
        """How the columns of its rows are read; None: by the columns that the run file names."""

    @property
    def probability(self) -> float | None:
        return self.section.probability

    @abstractmethod
    def rows(self) -> int:
        """Number of rows of the source, ignoring ``max_rows``."""

    @abstractmethod
    def read(self, index: int) -> dict[str, Any]:
        """All columns of a row."""

    def has(self, column: str) -> bool:
        """Whether any row has the column. A dotted name may be a value inside of a column."""
        if column in self.columns or column.partition(".")[0] not in self.columns:
            return column in self.columns
        return any(column in self[number].columns for number in range(len(self)))

    def location(self, index: int) -> str:
        """``train.jsonl, line 3``: for messages."""
        return f"{self.section.path}, row {index}"

    def __len__(self) -> int:
        rows = self.rows()
        return rows if self.section.max_rows is None else min(rows, self.section.max_rows)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has rows 0 to {len(self) - 1}, got {index}")
        return Row(self.read(index), self.name, index, self.layout)

    def values(self, column: str) -> Iterator[Any]:
        """The value of one column in every row; None for rows without it."""
        return (self.read(i).get(column) for i in range(len(self)))
