"""Formats findings: sizes, numbers and lists, without secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from rlhf.interfaces import Finding
from rlhf.secrets import find_secrets

GIB = 2**30


def redacted(finding: Finding, environment: Mapping[str, str] | None = None) -> Finding:
    """The finding with the values of secret environment variables replaced by ``$NAME``. An error message may quote
    them.

    Args:
        environment: the variables; None: those of this process.
    """
    text, remedy = finding.text, finding.remedy
    for name, value in _secrets(os.environ if environment is None else environment).items():
        text, remedy = text.replace(value, f"${name}"), remedy.replace(value, f"${name}")
    return replace(finding, text=text, remedy=remedy)


def _secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Secret values, longest first, so that a value that contains another one is replaced completely."""
    names = {path for path in find_secrets(dict(environment)) if len(environment.get(path, "")) >= 4}
    return {name: environment[name] for name in sorted(names, key=lambda n: -len(environment[n]))}


def gib(size: float) -> str:
    """Bytes as ``12.3 GiB``."""
    return f"{size / GIB:.1f} GiB"


def quantity(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
