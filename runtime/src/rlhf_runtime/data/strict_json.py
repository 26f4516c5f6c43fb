"""Strict JSON for data files. Refuses repeated keys, NaN, infinities and numbers that would be read as infinity,
because JSON readers treat them differently."""

from __future__ import annotations

import gc
import json
import math
from typing import Any, NoReturn


class NotStrictError(ValueError):
    """Text that Python accepts as JSON although it is not valid (RFC 8259), or although a value would be lost."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise NotStrictError(
            f"the key {duplicate!r} appears twice in one object, and only one of its values would be read"
        )
    return table


def _constant(text: str) -> NoReturn:
    raise NotStrictError(f"{text} is not a JSON number, and nothing can be computed from it. Write null, or omit it")


def _number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise NotStrictError(f"{text} is larger than the largest 64-bit number, and would be read as infinity")
    return number


STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_number)
"""One decoder for all calls. It has no state, and making one takes as long as reading a short row."""

_SPACE = " \t\r\n"


def decoded(text: str) -> Any:
    """A JSON value; None if the text is not strict JSON, or nested more deeply than Python reads."""
    try:
        return STRICT.decode(text)
    except (ValueError, RecursionError):
        return None


def decode_long(text: str) -> Any:
    """Decode a whole file. Garbage collection is off during this time. It would visit all rows repeatedly, which takes
    as long as the checks."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return STRICT.decode(text)
    finally:
        if collects:
            gc.enable()


def start_of_wrong(text: str) -> int:
    """Start of the first element of a JSON list that raises :class:`NotStrictError`. The list must be valid JSON."""
    position = text.index("[") + 1
    while True:
        while text[position] in _SPACE + ",":
            position += 1
        try:
            _, position = STRICT.raw_decode(text, position)
        except NotStrictError:
            return position
