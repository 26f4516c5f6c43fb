"""How the columns of a source are read: {field: column}, and a conversion of what stands there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data import conversions as convert

DEFAULTS: Mapping[str, str] = {
    "prompt": "prompt", "response": "response", "chosen": "chosen", "rejected": "rejected", "label": "label",
    "steps": "completions", "step_labels": "labels",
}  # fmt: skip
"""{field of the run file's [data]: the column it means where the run file names none and the source has it}."""

FIELDS = (*DEFAULTS, "messages", "margin")
"""Fields that name columns."""


def named_columns(section: DataSection) -> dict[str, str]:
    """{field: column} as the run file names them."""
    return {f: c for f in FIELDS if (c := getattr(section, f)) is not None}


@dataclass(frozen=True)
class Layout:
    """How the rows of a source are read: {field: column}, then a conversion of the values found there."""

    columns: Mapping[str, str]
    conversion: str = ""
    """A name of :data:`rlhf_runtime.data.conversions.CONVERSIONS`; empty: values are taken as they are."""
    chat: bool = False
    """Whether a chat template is used: some conversions make messages then."""
    given: bool = field(default=True, compare=False)
    """Whether all columns are those that the run file names or that have their default names: nothing to report."""

    def read(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """{field: value} of a row. A column that the row lacks is left out. Raises DataError (the conversion)."""
        values = {f: columns[c] for f, c in self.columns.items() if c in columns}
        return convert.CONVERSIONS[self.conversion](values, self.chat) if self.conversion else values

    def name(self, field: str) -> str:
        """The column of a field, for messages; all columns where a conversion makes the field of several."""
        return self.columns.get(field) or (", ".join(self.columns.values()) if self.conversion else DEFAULTS[field])

    def __str__(self) -> str:
        how = f" ({convert.describe(self.conversion)})" if self.conversion else ""
        return ", ".join(f if f == c else f"{f} = {c!r}" for f, c in self.columns.items()) + how
