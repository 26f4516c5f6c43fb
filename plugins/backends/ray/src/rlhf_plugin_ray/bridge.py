"""The driver's part of the way that weights take from the policy to the engines without passing through the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from rlhf.errors import ConfigError

from rlhf_plugin_ray.member import Member
from rlhf_plugin_ray.parcel import pack, send
from rlhf_plugin_ray.placing import Seat

if TYPE_CHECKING:
    from rlhf.sync.link import Kind
    from rlhf.sync.meeting import Meeting

    from rlhf_plugin_ray.engines import EngineGroup
    from rlhf_plugin_ray.group import RayGroup

LINKS = "accept:links"
"""Capability of a generator that takes shipments."""
STORE = "store"


class Bridge:
    """A link between the policy's ranks and the engines, made when weights are about to cross it, and made anew after
    anything went wrong on it."""

    def __init__(
        self,
        kind: Kind,
        policy: RayGroup,
        engines: EngineGroup,
        cuda: bool,
        timeout: float,
        answers: Callable[[Sequence[Member], Sequence[Any]], list[Any]],
    ) -> None:
        self.kind, self.policy, self.engines, self.cuda, self.timeout = kind, policy, engines, cuda, timeout
        self._answers = answers
        self._meeting: Meeting | None = None
        self.fit = False
        """Whether everything can cross."""

    def drop(self) -> None:
        """Whoever waits for another end stops waiting; nothing crosses until :meth:`build`."""
        self.fit = False
        if self._meeting is not None:
            self._meeting.give_up()

    def build(self) -> None:
        """Connect every end that lives now."""
        from rlhf.sync.link import Link
        from rlhf.sync.meeting import serve

        self.drop()
        self.policy.settle("connect")
        engines = list(self.engines.engines.values())
        counts = [self.engines.receivers_of(engine) for engine in engines]
        self._meeting, address = serve(ray.util.get_node_ip_address(), self.timeout)
        link = Link(self.kind, address, sum(counts), self.policy.size, self.cuda, self.timeout)
        firsts = [sum(counts[:n]) for n in range(len(engines))]
        members = [*self.policy.members, *engines]
        parcel = send(pack([*[(link,)] * self.policy.size, *[(link, first) for first in firsts]]))
        self._answers(members, [m.handle.call.remote("connect", parcel, n) for n, m in enumerate(members)])
        self.fit = True


def choose(
    transport: str, takes_links: bool, policy: Sequence[Seat], engines: Sequence[Seat], cuda: bool, nodes: Sequence[str]
) -> Kind | None:
    """The kind of link, None for the object store; ConfigError where what is asked for cannot be had.

    Args:
        transport: the run file's ``sync.transport``.
        takes_links: whether the generator does.
        nodes: of each bundle, where it is.
    """
    computing = [seat.slots[0] for seat in policy]  # a rank computes on the first of its devices
    used = {slot for seat in engines for slot in seat.slots}
    if cuda:
        shared = (
            "" if used <= set(computing) else "some engine lives on a device on which no rank of the policy computes"
        )
        broadcast = "" if computing[0] not in used else "rank 0 of the policy shares its device with an engine"
    else:
        home = nodes[policy[0].bundle]
        shared = (
            ""
            if all(nodes[s.bundle] == home for s in engines)
            else "an engine lives on another node than rank 0 of the policy"
        )
        broadcast = ""
    if not takes_links:
        shared = broadcast = "the generator takes no links (accept:links is not among its capabilities)"
    problems: dict[Kind, str] = {"shared": shared, "broadcast": broadcast}
    possible = [kind for kind, problem in problems.items() if not problem]
    if transport == "auto":
        return possible[0] if cuda and possible else None  # on a CPU the store is shared memory already
    if transport != STORE and transport not in possible:
        raise ConfigError(
            f"sync.transport = {transport!r} cannot be had: {problems[transport]}. Possible here: "  # type: ignore[index]
            f"{', '.join(map(repr, [STORE, *possible]))}, or leave it out."
        )
    return next((kind for kind in possible if kind == transport), None)
