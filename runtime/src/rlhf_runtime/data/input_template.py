"""``data.input_template``: the columns that it names, and the text that it makes from a row."""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from rlhf.errors import ConfigError, DataError, did_you_mean

BRACES = "Literal braces are written {{ and }}."


@cache
def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names, in order.

    Raises ConfigError: it is not a format string, it has a field without a name, or it names no column.
    """
    option = f"data.input_template = {template!r}"
    try:
        fields = list(_fields(template))
    except ValueError as error:
        raise ConfigError(f"{option} is not a format string: {error}. {BRACES}") from None
    names: list[str] = []
    for field, conversion in fields:
        name = re.split(r"[.\[]", field, maxsplit=1)[0]
        if not name or name.isdigit():
            raise ConfigError(
                f"{option} has the placeholder {{{field}}} without a column name. Write a name, e.g. "
                f"{{question}}. {BRACES}"
            )
        if conversion not in (None, "r", "s", "a"):
            raise ConfigError(f"{option}: {{{field}!{conversion}}} has an unknown conversion; allowed: !r, !s, !a.")
        names.append(name)
    if not names:
        raise ConfigError(
            f"{option} names no column, so every row would have the same prompt. Write the names of columns in braces, "
            "e.g. {question}."
        )
    return tuple(dict.fromkeys(names))


def _fields(template: str) -> Iterator[tuple[str, str | None]]:
    """(field, conversion) of every field, including those inside a field's format."""
    for _, field, spec, conversion in string.Formatter().parse(template):
        if field is not None:
            yield field, conversion
            yield from _fields(spec or "")


def check_template(template: str, columns: Collection[str], first: Mapping[str, Any]) -> None:
    """Raises DataError if the template does not fit a source: it names a column that no row has, or its format does not
    accept a value of the first row.

    Args:
        columns: columns of all rows.
        first: values of the first row.
    """
    names = template_columns(template)
    for name in names:
        if name not in columns:
            raise DataError(
                f"has no column {name!r}, which data.input_template = {template!r} names; its columns: "
                f"{', '.join(dict.fromkeys(columns))}.{did_you_mean(name, columns)}"
            )
    if all(first.get(name) is not None for name in names):
        try:
            fill(template, first)
        except DataError as error:
            raise DataError(
                f"does not fit its template, as its first row shows: {error}. Correct the template."
            ) from None


def fill(template: str, columns: Mapping[str, Any]) -> str:
    """The template with a row's values. Raises DataError if a value is missing or null, or if the template's format
    does not accept it."""
    for name in template_columns(template):
        if columns.get(name) is None:
            raise DataError(
                f"data.input_template = {template!r}: the row has {'null in' if name in columns else 'no'} column "
                f"{name!r}; columns of the row: {', '.join(columns)}"
            )
    try:
        return template.format_map(columns)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"data.input_template = {template!r}: {type(error).__name__}: {error}") from None
