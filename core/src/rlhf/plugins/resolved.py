"""A plugin that was imported and checked."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

IN_PROCESS = "in process"
"""The distribution of a class that was registered with :meth:`rlhf.plugins.Plugins.register`."""
FILE = "file"
"""The distribution of a class taken from a ``file:`` reference."""
MODULE = "python"
"""The distribution of a class, or of a reward function, taken from a ``python:`` reference."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A plugin's class, imported and checked, with its origin.

    Pickles as its reference (:mod:`rlhf.plugins.registry`).
    """

    kind: str
    name: str
    cls: type[Any]
    distribution: str
    version: str
    ref: str
    """The reference as the user wrote it."""
    sha256: str = ""
    """SHA-256 of the file's bytes, or of the source of a class of this process or of a module; empty for installed
    plugins."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that the reference itself sets: ``model:PATH`` is the plugin ``model`` with ``{"model": PATH}``."""
    path: str = ""
    """The file of a ``file:`` reference."""
    text: str = field(default="", repr=False)
    """Source text of that file, as read."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({f'{self.distribution} {self.version}'.strip()})"

    def manifest(self) -> dict[str, str]:
        """Identity of this plugin in a run's ``manifest.json``. Plugins that are not installed have a SHA-256."""
        item = {"kind": self.kind, "name": self.name, "distribution": self.distribution, "version": self.version}
        if self.distribution in (FILE, MODULE):
            item |= {"ref": self.ref, "sha256": self.sha256}
        elif self.distribution == IN_PROCESS:
            item |= {"sha256": self.sha256}
        return item


def source_sha256(cls: type[Any]) -> str:
    """SHA-256 (hexadecimal) of the source of a class of this process, or of the function that it was created from (its
    attribute ``made_from``). If a function's source is not available, the SHA-256 of its compiled code; empty if that
    is not available either."""
    source = getattr(cls, "made_from", cls)
    try:
        return hashlib.sha256(inspect.getsource(source).encode()).hexdigest()
    except (OSError, TypeError):  # typed at a prompt, or an object without source
        code = getattr(source, "__code__", None)
        if code is None:
            return ""
        constants = [c for c in code.co_consts if not inspect.iscode(c)]
        return hashlib.sha256(repr((code.co_code, code.co_names, constants)).encode()).hexdigest()
