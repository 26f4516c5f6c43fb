"""Functions that run in a process of their own on the node of a worker. Standard library only."""

from __future__ import annotations

from collections import deque


def tail_of(path: str, lines: int) -> str:
    """The last lines of a worker's log, without those that Ray writes for itself."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            last = deque((line for line in file if not line.startswith((":job_id:", ":actor_name:"))), lines)
    except OSError as cause:
        return f"({path} cannot be read: {cause.strerror})"
    return "".join(f"  {line.rstrip()}\n" for line in last).rstrip() or "  (nothing)"
