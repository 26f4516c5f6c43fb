"""Placeholders in a run file: values that a person has to write before the file can be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_runtime.config.problems import origin

_BEGIN, _END = "<fill in: ", ">"


def placeholder(description: str) -> str:
    """Text that :func:`unfilled` finds.

    Args:
        description: the value that belongs there, in a few words.
    """
    return f"{_BEGIN}{description}{_END}"


def unfilled(data: Any, origins: Mapping[str, str]) -> list[str]:
    """One line for every placeholder that is left in nested tables and lists.

    Args:
        origins: {dotted path: file and line}.
    """
    return [
        f"{path}{origin(path, origins)}: still holds the placeholder {text!r}. Write a value in its place, or give "
        f"--{path} VALUE."
        for path, text in _left(data, "")
    ]


def _left(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _left(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _left(item, f"{path}.{number}")
    elif isinstance(value, str) and value.startswith(_BEGIN) and value.endswith(_END):
        yield path, str(value)
