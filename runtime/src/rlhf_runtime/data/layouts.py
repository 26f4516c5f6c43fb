"""Layouts: how fields are read from the columns of a source, by {field: column} and a conversion of the values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data import conversions as convert

DEFAULTS: Mapping[str, str] = {
    "prompt": "prompt", "response": "response", "chosen": "chosen", "rejected": "rejected", "label": "label",
    "steps": "completions", "step_labels": "labels", "images": "images",
}  # fmt: skip
"""{field of the run file's [data]: its default column}. It is used if the run file names none and the source has it."""

TOOLS = "tools"
"""The column of descriptions of functions that the chat template shows, and its field. No option names another."""

ONE_IMAGE = "image"
"""The column of images in many published datasets, where there is no ``images``."""

FIELDS = (*DEFAULTS, "messages", "margin")
"""Fields of ``[data]`` that name columns."""


def named_columns(section: DataSection) -> dict[str, str]:
    """{field: column} as the run file names them."""
    return {f: c for f in FIELDS if (c := getattr(section, f)) is not None}


@dataclass(frozen=True)
class SourceLayout:
    """How the rows of a source are read: {field: column}, then a conversion of the values in these columns."""

    columns: Mapping[str, str]
    conversion: str = ""
    """A name in :data:`rlhf_runtime.data.conversions.CONVERSIONS`; empty: values are not converted."""
    chat: bool = False
    """Whether a chat template is used. Some conversions then make messages."""
    whole: bool = False
    """Whether the answers of a pair may be whole conversations, which is decided row by row. The run file names no
    prompt then."""
    given: bool = field(default=True, compare=False)
    """Whether the run file names all columns, or they have their default names. Such a layout is not reported."""
    folder: Path | None = field(default=None, compare=False)
    """Paths of images start here."""

    def read(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """{field: value} of a row. Columns that the row lacks are left out. Raises DataError if the conversion
        fails."""
        values = {f: columns[c] for f, c in self.columns.items() if c in columns}
        values = convert.without_repeated_prompt(values) if self.whole else values
        return convert.CONVERSIONS[self.conversion](values, self.chat) if self.conversion else values

    def name(self, field: str) -> str:
        """The column of a field, for messages; several columns if a conversion makes the field from several."""
        return self.columns.get(field) or (
            ", ".join(self.columns.values()) if self.conversion else DEFAULTS.get(field, field)
        )

    def __str__(self) -> str:
        how = f" ({convert.describe(self.conversion)})" if self.conversion else ""
        return ", ".join(f if f == c else f"{f} = {c!r}" for f, c in self.columns.items()) + how
