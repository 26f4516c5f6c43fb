"""One actor as the driver sees it: who it is, where it lives, and how its end is told."""

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
    """Of the actor."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What :meth:`Worker.describe` said."""

    @property
    def where(self) -> str:
        """``node 10.0.0.1, pid 123``."""
        return f"node {self.facts.get('address', '?')}, pid {self.facts.get('pid', '?')}"

    def beside(self, method: str) -> Any:
        """Call a method that runs while another is at work; the reference to its answer."""
        return getattr(self.handle, method).options(concurrency_group="watch").remote()

    def on_its_node(self, function: Callable[..., str], *arguments: Any) -> str:
        """What ``function`` says in another process of the same node; why there is none, where it cannot run."""
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
        """What to say about an actor that is gone."""
        lines = [f"{self.name} ({self.where}) died during {doing}: {_exit_cause(cause)}"]
        if path := self.facts.get("stderr"):
            lines.append(f"The end of its standard error ({path}):")
            lines.append(self.on_its_node(log_tail, path, TAIL_LINES))
        return "\n".join(lines)

    def kill(self) -> None:
        """End the process at once; nothing where it, or the connection to the cluster, is gone."""
        if ray.is_initialized():
            with suppress(RayError):
                ray.kill(self.handle, no_restart=True)


def slug(name: str) -> str:
    """A member's name where there may be no spaces: ``policy-1``, ``engine-0``."""
    return name.replace(" rank ", "-").replace(" ", "-")


def _exit_cause(error: RayError) -> str:
    """Ray's words about why, on one line, without its advice to the reader of logs."""
    text = " ".join(str(error).split())
    if isinstance(error, RayActorError):
        for start in ("Worker exit detail: ", "The actor is dead because ", "The actor died because of "):
            if start in text:
                text = text.partition(start)[2]
                break
    for advice in (" There are some potential root causes", " Some common causes include", " Never start"):
        text = text.partition(advice)[0]
    if "unexpectedly exits" in text:
        return f"its process was killed (SIGKILL, or the kernel for want of memory) or crashed. Ray: {text}"
    return text
