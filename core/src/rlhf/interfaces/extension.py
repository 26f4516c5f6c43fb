"""The base class of commands, checks and backends. It does not import pydantic, so that commands start fast."""

from __future__ import annotations

from typing import ClassVar


class Extension:
    """Base of the interfaces that extend the program: commands, checks and backends. Not used directly.

    A subclass sets ``name`` (lower case, ``[a-z0-9_]+``, equal to its entry point's name). It has no ``Config`` and no
    state for the checkpoint. The program builds one instance as ``cls()``.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    """Paper or documentation that the extension implements, shown by ``rlhf plugins show``."""
