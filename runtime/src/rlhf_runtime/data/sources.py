"""Data sources: rows with a name, columns, a fingerprint, and the file and line of each row.

Nothing is cached on disk, and types are not guessed: a ``csv`` cell is text, and a blank line is not a row. A file that
changed between two runs has another fingerprint.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from rlhf.types import Row

from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.data.layouts import SourceLayout


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
        """How the columns of its rows are read; None: as the run file names them."""

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

    def where(self, index: int) -> str:
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
