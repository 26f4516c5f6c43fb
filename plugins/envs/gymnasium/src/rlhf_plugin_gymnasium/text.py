"""Observations as text."""

from __future__ import annotations

import math
import re
from typing import Any

import gymnasium
from gymnasium import spaces

LARGEST = 64
"""Largest number of values of an array that is written as text."""
COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
COLOURED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)
OTHER_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def cannot_be_text(space: gymnasium.Space[Any]) -> str:
    """Why observations of ``space`` cannot be written as text; empty if they can."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.values() if isinstance(space, spaces.Dict) else space
        return next(filter(None, map(cannot_be_text, parts)), "")
    if isinstance(space, spaces.Discrete | spaces.Text):
        return ""
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        size = math.prod(space.shape)
        return (
            "" if size <= LARGEST else f"an array of {size} values is too long as text, at most {LARGEST} are written"
        )
    return f"{type(space).__name__} spaces are not written as text"


def as_text(space: gymnasium.Space[Any], value: Any) -> str:
    """``value`` of ``space``: numbers with at most 4 digits, arrays in brackets, one line for each key of a table."""
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{key}: {as_text(part, value[key])}" for key, part in space.items())
    if isinstance(space, spaces.Tuple):
        return "(" + ", ".join(as_text(part, item) for part, item in zip(space, value, strict=True)) + ")"
    if isinstance(space, spaces.Text):
        return str(value)
    return _numbers(value.tolist() if hasattr(value, "tolist") else value)


def plain(rendered: str) -> str:
    """A terminal's text without its codes. A coloured character becomes ``[red:S]``, because the colour has a meaning:
    where the player is."""
    text = COLOURED.sub(lambda match: _named(match[1], match[2]), rendered)
    return OTHER_CODES.sub("", text).strip("\n")


def _named(codes: str, text: str) -> str:
    for code in map(int, filter(None, codes.split(";"))):
        if code // 10 in (3, 4, 9, 10) and code % 10 < 8:
            return f"[{COLOURS[code % 10]}:{text}]"
    return text


def _numbers(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_numbers, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(int(value))
