"""Sizes in bytes, in readable form."""

from __future__ import annotations

import re

from rlhf.errors import ConfigError

UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)}
UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)}


def parse(text: str, option: str) -> int:
    """``80GiB``, ``1.5 TB``, ``24000000000`` -> bytes.

    Raises ConfigError if ``text`` is not a number with one of :data:`UNITS`, or is less than 1 MiB, such as ``80``
    without its unit.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    factor = {name.lower(): value for name, value in UNITS.items()}.get(match.group(2).lower()) if match else None
    size = 0 if match is None or factor is None else int(float(match.group(1)) * factor)
    if size < 2**20:
        raise ConfigError(f"{option} is {text!r}; give a number and a unit, e.g. 80GiB, 80GB or 512MiB, at least 1MiB")
    return size


def text(count: float) -> str:
    """``1.50 GiB``, ``320 MiB``; three significant digits."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            value = count / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{count:.0f} B"
