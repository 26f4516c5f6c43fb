"""Data sources: where rows come from, each with a name, its columns, a fingerprint, and where row i was written.

Nothing is cached on disk here and nothing is guessed: a ``csv`` cell is text, a blank line is no row, and a file that
changed between two runs has another fingerprint.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.data_section import SourceSection
from rlhf.errors import DataError, did_you_mean
from rlhf.hub import HubName, hub_name
from rlhf.types import Row

if TYPE_CHECKING:
    from rlhf.data.layouts import Layout
    from rlhf.data.text_files import CsvForm

FILE_KINDS = ("jsonl", "json", "csv", "parquet", "arrow")


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


def load_source(section: SourceSection) -> Source:
    """Open a source: a file, a folder saved by ``datasets``, or a hub name where no such path exists.

    Raises DataError: missing (with what is there), empty, malformed (file and line), a split or subset that is not
    there.
    """
    path = Path(section.path).expanduser()
    source: Source
    if path.is_dir():
        source = _saved(section, path)
    elif path.exists():
        kind = file_kind(path)
        if kind is None:
            raise DataError(
                f"{path}: unknown kind of file; allowed are .jsonl, .json and .csv (each also with .gz), .parquet and "
                ".arrow"
            )
        if section.subset is not None or section.split != "train":
            asked = f"subset = {section.subset!r}" if section.subset is not None else f"split = {section.split!r}"
            raise DataError(f"{path}: {asked}, but a file has neither subsets nor splits; name the file that holds it")
        source = open_file(section, path, kind)
    elif (named := hub_name(section.path)) is not None and file_kind(path) is None:
        source = _hub(section, named)
    else:
        raise DataError(_missing(path))
    if not len(source):
        raise DataError(f"{section.path} holds no rows")
    return source


def file_kind(path: Path) -> str | None:
    """The kind of data file by its name, or None."""
    suffixes = [s.lower() for s in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = (suffixes[:-1] if packed else suffixes)[-1:]
    name = kind[0].removeprefix(".") if kind else ""
    if name == "ndjson":
        name = "jsonl"
    return name if name in FILE_KINDS and not (packed and name in ("parquet", "arrow")) else None


def open_file(section: SourceSection, path: Path, kind: str, form: CsvForm | None = None) -> Source:
    """The rows of one file; ``form`` is that of a csv, where it is not the usual one."""
    from rlhf.data import tables, text_files

    if kind in ("parquet", "arrow"):
        return tables.TableSource(section, tables.read_table(path, kind))
    return text_files.open_text(section, path, kind, form or text_files.USUAL)


def _saved(section: SourceSection, path: Path) -> Source:
    from rlhf.data import tables

    if not ((path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists()):
        files = sorted(p.name for p in path.iterdir() if p.is_file() and file_kind(p) is not None)
        there = f" Name one of its files: {', '.join(files[:20])}." if files else " It holds no data file either."
        raise DataError(f"{path} is a folder, but not one that `datasets` saved (save_to_disk).{there}")
    return tables.DatasetSource(section, tables.load_saved(path, section))


def _hub(section: SourceSection, asked: HubName) -> Source:
    from rlhf.data import hub_files

    return hub_files.open_hub(section, asked)


def _missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"no data file {path}: the folder {folder} does not exist"
    beside = sorted(p.name for p in folder.iterdir() if file_kind(p) is not None)
    there = f"it has {', '.join(beside[:20])}.{did_you_mean(path.name, beside)}" if beside else "it has no data files"
    return f"no data file {path}. In {folder}: {there}"
