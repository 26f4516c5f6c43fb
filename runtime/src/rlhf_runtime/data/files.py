"""Data files: their kind, by name, and their rows."""

from __future__ import annotations

from pathlib import Path

from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.data.sources import Source
from rlhf_runtime.data.tables import TableSource, read_table
from rlhf_runtime.data.text_files import USUAL, CsvForm, open_text

FILE_KINDS = ("jsonl", "json", "csv", "parquet", "arrow")


def file_kind(path: Path) -> str | None:
    """The kind of data file by its name, or None."""
    suffixes = [s.lower() for s in path.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = (suffixes[:-1] if packed else suffixes)[-1:]
    name = kind[0].removeprefix(".") if kind else ""
    if name == "ndjson":
        name = "jsonl"
    return name if name in FILE_KINDS and not (packed and name in ("parquet", "arrow")) else None


def open_file(section: SourceSection, path: Path, kind: str, form: CsvForm = USUAL) -> Source:
    """The rows of one file. ``form`` is used for csv files only."""
    if kind in ("parquet", "arrow"):
        return TableSource(section, read_table(path, kind))
    return open_text(section, path, kind, form)
