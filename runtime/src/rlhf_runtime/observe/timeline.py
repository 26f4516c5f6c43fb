"""What a run tells its timeline. Without a timeline, nothing is recorded.

The file is written by :mod:`rlhf_runtime.observe.timeline_file`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

Kind = Literal["driver", "samples", "rewards", "events"]


class Slice:
    """A block of code that is under way; here of a run without a timeline."""

    def child(self, name: str, **arguments: Any) -> AbstractContextManager[Slice]:
        """A block inside of this one."""
        return _NOTHING

    def add(self, **arguments: Any) -> None:
        """Further arguments, which the viewers show with the slice."""


_NOTHING = nullcontext(Slice())


class Timeline:
    """What a run calls; here of a run without a timeline."""

    def step(self, step: int | None) -> None:
        """``step`` begins; None: the last step has ended."""

    def phase(self, name: str) -> AbstractContextManager[Slice]:
        """A phase of the step, on the main thread."""
        return _NOTHING

    def slice(self, kind: Kind, name: str, **arguments: Any) -> AbstractContextManager[Slice]:
        """A block that may run while others do."""
        return _NOTHING

    def instant(self, name: str, **arguments: Any) -> None:
        """Something that takes no time."""

    def close(self) -> None:
        """Complete the file."""


NO_TIMELINE = Timeline()
