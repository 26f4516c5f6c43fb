"""The driver's part of a link, over which weights go from the policy to the engines without the store."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf.errors import ConfigError, SyncError, WorkerError

from rlhf_workers.driver.failures import FailedCall, result_of
from rlhf_workers.driver.handle import WorkerHandle
from rlhf_workers.driver.watchdog import Watch
from rlhf_workers.engines.pool import EngineWorkers
from rlhf_workers.placement import Allocation
from rlhf_workers.process.payload import pack

if TYPE_CHECKING:
    from rlhf_workers.driver.rank_group import RankGroup
    from rlhf_workers.links.coordination import Coordination
    from rlhf_workers.links.link import Kind

NO_LINKS = "the generator does not support links (it is not a ReceivesOverLinks)"
STORE = "store"


class WeightLink:
    """A link between the policy's ranks and the engines. :meth:`build` connects it before the first sync, and again
    after any failure."""

    def __init__(self, kind: Kind, policy: RankGroup, cuda: bool, timeout: float, watch: Watch) -> None:
        self.kind, self.policy, self.cuda, self.timeout = kind, policy, cuda, timeout
        self._watch = watch
        self._coordination: Coordination | None = None
        self._receivers: int | None = None
        """Processes of one engine that receive weights; the same for all engines."""
        self.fit = False
        """Whether all ends are connected and none failed."""

    def drop(self) -> None:
        """Abort all waits on the link. It is unusable until :meth:`build`."""
        self.fit = False
        if self._coordination is not None:
            self._coordination.abort()

    def build(self, pool: EngineWorkers) -> None:
        """Connect every end; all engines must be alive. If an engine dies meanwhile, the pool records it and the link
        is not fit."""
        from rlhf_workers.links.coordination import serve
        from rlhf_workers.links.link import Link

        self.drop()
        # After a failed sync rank 0 may still be in the stream of its buckets.
        self.policy.finish_stream("connect_trainer")
        if self._receivers is None:
            first = min(pool.members)
            self._receivers = pool.ask("receivers", engines=[first]).get(first)
        if self._receivers is None:  # it died
            return
        engines, receivers = pool.members, self._receivers
        self._coordination, address = serve(pool.calls.host, self.timeout)
        link = Link(self.kind, address, receivers * len(engines), self.policy.size, self.cuda, self.timeout)
        arguments = [*[(link,)] * self.policy.size, *[(link, receivers * n) for n in range(len(engines))]]
        failed = self._connect([*self.policy.members, *engines.values()], arguments, pool)
        deaths = {n: e for n, t in failed.items() if isinstance(e := t.error("connect", SyncError), WorkerError)}
        for n in deaths:
            if n < self.policy.size:
                raise self.policy.first_cause("connect_trainer", failed[n], {})
        for n, death in deaths.items():
            pool.record_death(list(engines)[n - self.policy.size], death)
        if failed and not deaths:
            raise min(failed.values(), key=lambda t: t.order).error("connect", SyncError)
        self.fit = not failed

    def _connect(
        self, members: Sequence[WorkerHandle], arguments: Sequence[tuple[Any, ...]], pool: EngineWorkers
    ) -> dict[int, FailedCall]:
        """Wait until all members have answered. Returns {position in ``members``: its failure}."""
        payload = pool.calls.send(pack(arguments))
        methods = ["connect_trainer" if n < self.policy.size else "connect" for n in range(len(members))]
        waiting = {m.ask("call", methods[n], payload, n): n for n, m in enumerate(members)}
        watchdog = self._watch(members, "connect()", pool.kill_stalled)
        failed: dict[int, FailedCall] = {}
        while waiting:
            for ref in watchdog.wait(list(waiting)):
                n = waiting.pop(ref)
                watchdog.leave(members[n])
                if isinstance(answer := result_of(pool.calls, members[n], ref), FailedCall):
                    failed[n] = answer
                    self.drop()  # the other ends may wait for this one
        return failed


def choose_kind(
    transport: str,
    takes_links: bool,
    policy: Sequence[Allocation],
    engines: Sequence[Allocation],
    cuda: bool,
    nodes: Sequence[str],
) -> Kind | None:
    """The kind of link; None for the object store. Raises ConfigError if ``transport`` is not possible.

    Args:
        transport: the run file's ``sync.transport``.
        takes_links: whether the generator is a ``ReceivesOverLinks``.
        nodes: the node of each bundle.
    """
    computing = [allocation.slots[0] for allocation in policy]  # a rank computes on its first device
    used = {slot for allocation in engines for slot in allocation.slots}
    if cuda:
        shared = "" if used <= set(computing) else "an engine is on a device without a rank of the policy"
        broadcast = "" if computing[0] not in used else "rank 0 of the policy shares its device with an engine"
    else:
        home = nodes[policy[0].bundle]
        shared = ""
        if sys.platform != "linux":
            shared = f"processes map the memory of others through /proc, but this is {sys.platform}"
        elif any(nodes[s.bundle] != home for s in engines):
            shared = "an engine is not on the node of rank 0 of the policy"
        broadcast = ""
    if not takes_links:
        shared = broadcast = NO_LINKS
    problems: dict[Kind, str] = {"shared": shared, "broadcast": broadcast}
    possible = [kind for kind, problem in problems.items() if not problem]
    if transport == "auto":
        return possible[0] if cuda and possible else None  # on CPUs the store is shared memory, too
    if transport != STORE and transport not in possible:
        raise ConfigError(
            f"sync.transport = {transport!r} is not possible: {problems[transport]}. Possible here: "  # type: ignore[index]
            f"{', '.join(map(repr, [STORE, *possible]))}, or remove the option."
        )
    return next((kind for kind in possible if kind == transport), None)
