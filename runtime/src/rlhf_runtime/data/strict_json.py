"""JSON of data files, without what readers would take differently: names that come twice, NaN and infinities."""

from __future__ import annotations

import gc
import json
from typing import Any, NoReturn


class NotStrictError(ValueError):
    """It is read as JSON by Python, and is none (RFC 8259), or loses a value."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise NotStrictError(f"the key {twice!r} comes twice in one object, and only one of its values would be read")
    return found


def _constant(text: str) -> NoReturn:
    raise NotStrictError(f"{text} is no JSON number, and nothing can be computed from it. Write null, or leave it out")


STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
"""One for all: it holds no state, and to make one takes as long as to read a short row."""

_SPACE = " \t\r\n"


def decode_long(text: str) -> Any:
    """What a whole file holds. The collector of garbage is kept out: it would look at all rows again and again, which
    takes as long as the checks."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return STRICT.decode(text)
    finally:
        if collects:
            gc.enable()


def start_of_wrong(text: str) -> int:
    """Where the first element of a JSON list begins that raises :class:`NotStrictError`; the list itself is JSON."""
    at = text.index("[") + 1
    while True:
        while text[at] in _SPACE + ",":
            at += 1
        try:
            _, at = STRICT.raw_decode(text, at)
        except NotStrictError:
            return at
