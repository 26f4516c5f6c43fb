"""Ray actors as workers: the actor class, and the driver's handle of an actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rlhf_workers.driver.calls import CallFailed, Calls
from rlhf_workers.driver.handle import WorkerHandle
from rlhf_workers.process.payload import Payload, Stored
from rlhf_workers.process.worker import Worker

_ASK_SECONDS = 20.0


class RayWorker(Worker):
    """The actor class."""

    def address(self) -> str:
        address: str = ray.util.get_node_ip_address()
        return address

    def describe(self, plugins: bytes, manifest: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        facts = super().describe(plugins, manifest)
        facts["versions"]["ray"] = ray.__version__
        return facts | {"node": ray.get_runtime_context().get_node_id()}


@dataclass(frozen=True, slots=True)
class InRay(Stored):
    """An object of Ray's store."""

    ref: Any

    @classmethod
    def fetch(cls, handles: Sequence[InRay]) -> list[Any]:
        return ray.get([handle.ref for handle in handles])


class RayCalls(Calls):
    """References are Ray's references. Streams are Ray's generators of references."""

    def __init__(self) -> None:
        self.host = ray.util.get_node_ip_address()

    def wait(
        self, waitables: Sequence[Any], count: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        # fetch_local=False: the driver must know that an object exists, but needs no copy of weights on another node.
        return ray.wait(list(waitables), num_returns=count, timeout=timeout, fetch_local=False)

    def get(self, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            raise CallFailed(repr(getattr(error, "cause", error)), died=False, trace=str(error)) from None
        except RayError as error:
            raise CallFailed(_exit_cause(error), died=True) from None

    def put(self, payload: Payload) -> InRay:
        return InRay(ray.put(payload))

    def stored(self, ref: Any) -> InRay:
        return InRay(ref)

    @property
    def connected(self) -> bool:
        return ray.is_initialized()


class Actor(WorkerHandle):
    """The driver's handle of one actor."""

    def __init__(self, name: str, handle: Any) -> None:
        """``handle``: Ray's actor handle."""
        super().__init__(name)
        self.handle = handle

    def ask(self, method: str, *arguments: Any) -> Any:
        return getattr(self.handle, method).remote(*_plain(arguments))

    def items(self, method: str, *arguments: Any, queue_size: int | None = None) -> Any:
        options: dict[str, Any] = {"num_returns": "streaming"}
        if queue_size is not None:
            options["_generator_backpressure_num_objects"] = queue_size
        return getattr(self.handle, method).options(**options).remote(*_plain(arguments))

    def side_call(self, method: str) -> Any:
        return getattr(self.handle, method).options(concurrency_group="watch").remote()

    def on_its_node(self, function: Callable[..., str], *arguments: Any) -> str:
        if "node" not in self.facts:
            return "(its node is not known)"
        if self.facts["node"] == ray.get_runtime_context().get_node_id():
            return function(*arguments)
        place = NodeAffinitySchedulingStrategy(self.facts["node"], soft=False)
        task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
        try:
            answer: str = ray.get(task.remote(*arguments), timeout=_ASK_SECONDS)
        except (RayError, TimeoutError) as cause:
            return f"(node {self.facts['address']} does not answer: {type(cause).__name__})"
        return answer

    def kill(self) -> None:
        if ray.is_initialized():
            with suppress(RayError):
                ray.kill(self.handle, no_restart=True)


def _plain(arguments: Sequence[Any]) -> list[Any]:
    """The arguments, with handles replaced by Ray's references, so that Ray passes the values."""
    return [argument.ref if isinstance(argument, InRay) else argument for argument in arguments]


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
