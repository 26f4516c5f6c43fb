"""Data sources: where rows come from, each with a name, its columns, a fingerprint, and where row i was written.

Nothing is cached on disk here and nothing is guessed: a ``csv`` cell is text, a blank line is no row, and a file that
changed between two runs has another fingerprint.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from rlhf.types import Row

from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.data.layouts import Layout


class Source(ABC):
    """Rows by index, read when asked for."""

    def __init__(self, section: SourceSection, columns: list[str], fingerprint: str) -> None:
        self.section = section
        self.name = section.label
        self.columns = columns
        """Every column that some row has."""
        kept = f"{fingerprint} {section.max_rows}"
        self.fingerprint = hashlib.sha256(kept.encode()).hexdigest()
        """sha256 (hexadecimal) over what the source holds; equal data, equal fingerprint."""
        self.layout: Layout | None = None
        """How the columns of its rows are read; absent: as the run file names them."""

    @property
    def probability(self) -> float | None:
        return self.section.probability

    @abstractmethod
    def rows(self) -> int:
        """How many rows the source holds, ``max_rows`` not considered."""

    @abstractmethod
    def read(self, index: int) -> dict[str, Any]:
        """All columns of a row."""

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
        """One column of every row; None where a row lacks it."""
        return (self.read(i).get(column) for i in range(len(self)))
