"""One actor as the driver sees it: its name, its node, and the message about its death."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_plugin_ray.workers.node_tools import log_tail

TAIL_LINES = 15
_ASK_SECONDS = 20.0


@dataclass
class WorkerHandle:
    """A rank of a role, or an engine."""

    name: str
    """``policy rank 1``, ``engine 0``."""
    handle: Any
    """Ray's handle of the actor."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The result of :meth:`Worker.describe`."""

    @property
    def where(self) -> str:
        """``node 10.0.0.1, pid 123``."""
        return f"node {self.facts.get('address', '?')}, pid {self.facts.get('pid', '?')}"

    def beside(self, method: str) -> Any:
        """Call a method that runs in the actor's second thread, beside another call. Returns a reference."""
        return getattr(self.handle, method).options(concurrency_group="watch").remote()

    def on_its_node(self, function: Callable[..., str], *arguments: Any) -> str:
        """Run ``function`` in another process on the actor's node, and return its text; if it cannot run, why not."""
        if "node" not in self.facts:
            return "(its node is not known)"
        if self.facts["node"] == ray.get_runtime_context().get_node_id():
            return function(*arguments)
        place = NodeAffinitySchedulingStrategy(self.facts["node"], soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
        try:
            found: str = ray.get(task.remote(*arguments), timeout=_ASK_SECONDS)
        except (RayError, TimeoutError) as cause:
            return f"(node {self.facts['address']} gives no answer: {type(cause).__name__})"
        return found

    def death(self, cause: RayError, doing: str) -> str:
        """The message about a dead actor."""
        lines = [f"{self.name} ({self.where}) died during {doing}: {_exit_cause(cause)}"]
        if path := self.facts.get("stderr"):
            lines.append(f"The end of its standard error ({path}):")
            lines.append(self.on_its_node(log_tail, path, TAIL_LINES))
        return "\n".join(lines)

    def kill(self) -> None:
        """End the process at once. Does nothing if the process or the connection to the cluster is gone."""
        if ray.is_initialized():
            with suppress(RayError):
                ray.kill(self.handle, no_restart=True)


def slug(name: str) -> str:
    """A worker's name without spaces: ``policy-1``, ``engine-0``."""
    return name.replace(" rank ", "-").replace(" ", "-")


def _exit_cause(error: RayError) -> str:
    """Ray's message about the cause, on one line, without its advice."""
    text = " ".join(str(error).split())
    if isinstance(error, RayActorError):
        for start in ("Worker exit detail: ", "The actor is dead because ", "The actor died because of "):
            if start in text:
                text = text.partition(start)[2]
                break
    for advice in (" There are some potential root causes", " Some common causes include", " Never start"):
        text = text.partition(advice)[0]
    if "unexpectedly exits" in text:
        return f"its process was killed (by SIGKILL, or by the kernel when memory ran out) or crashed. Ray: {text}"
    return text
