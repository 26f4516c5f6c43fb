"""The driver's handle of one worker: its calls, its location, and the message about its death."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rlhf_workers.driver.calls import CallFailed
from rlhf_workers.driver.node_tools import log_tail

TAIL_LINES = 15


class WorkerHandle(ABC):
    """A rank of a role, or an engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        """``policy rank 1``, ``engine 0``."""
        self.facts: dict[str, Any] = {}
        """The result of :meth:`rlhf_workers.process.worker.Worker.describe`."""

    @property
    def location(self) -> str:
        """``node 10.0.0.1, pid 123``."""
        return f"node {self.facts.get('address', '?')}, pid {self.facts.get('pid', '?')}"

    @abstractmethod
    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of :class:`~rlhf_workers.process.worker.Worker` without waiting. Calls run in order. Returns a
        reference. An argument may be a handle of the store."""

    @abstractmethod
    def items(self, method: str, *arguments: Any, queue_size: int | None = None) -> Any:
        """Call a generator method without waiting. Returns a stream.

        Args:
            queue_size: maximum number of unread items; None: no limit.
        """

    @abstractmethod
    def side_call(self, method: str) -> Any:
        """Call ``pulse`` or ``stacks``, which run beside another call. Returns a reference."""

    @abstractmethod
    def on_its_node(self, function: Callable[..., str], *arguments: Any) -> str:
        """Run ``function`` in another process on the worker's node, or here if this is that node. Returns its text, or
        the reason why it cannot run."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once. Does nothing if the process has ended."""

    def death(self, cause: CallFailed, doing: str) -> str:
        """The message about a dead worker."""
        lines = [f"{self.name} ({self.location}) died during {doing}: {cause}"]
        if path := self.facts.get("stderr"):
            lines.append(f"The end of its standard error ({path}):")
            lines.append(self.on_its_node(log_tail, path, TAIL_LINES))
        return "\n".join(lines)


def slug(name: str) -> str:
    """A worker's name without spaces: ``policy-1``, ``engine-0``."""
    return name.replace(" rank ", "-").replace(" ", "-")
