"""One line of the doctor's report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from rlhf_runtime.config.secrets import find_secrets

Status = Literal["ok", "warn", "fail", "skipped"]
STATUSES: tuple[Status, ...] = ("ok", "warn", "fail", "skipped")

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it is, and what to do about it."""

    name: str
    status: Status
    """``fail``: a run will not work; ``warn``: it may not, or slowly; ``skipped``: not looked at, for the reason in
    ``found``."""
    found: str
    remedy: str = ""
    """What to do; never empty for ``warn`` and ``fail``."""

    def __post_init__(self) -> None:
        if self.status in ("warn", "fail") and not self.remedy:
            raise ValueError(f"the check {self.name!r} is {self.status!r} and says nothing about what to do")

    def redacted(self, environment: Mapping[str, str] | None = None) -> Check:
        """With the values of secret environment variables replaced by ``$NAME``: an error message may quote them."""
        found, remedy = self.found, self.remedy
        for name, value in _secrets(os.environ if environment is None else environment).items():
            found, remedy = found.replace(value, f"${name}"), remedy.replace(value, f"${name}")
        return replace(self, found=found, remedy=remedy)

    def as_json(self) -> dict[str, str]:
        """``name``, ``status``, ``found``, ``remedy``."""
        return asdict(self)


def _secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Longer values first, so that one which contains another is replaced whole."""
    names = {path for path in find_secrets(dict(environment)) if len(environment.get(path, "")) >= 4}
    return {name: environment[name] for name in sorted(names, key=lambda n: -len(environment[n]))}


def gib(size: float) -> str:
    """Bytes as ``12.3 GiB``."""
    return f"{size / GIB:.1f} GiB"


def counted(number: int, what: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def listed(items: list[str], most: int = 6) -> str:
    """``a, b, c and 4 more``."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
