"""From the run file's placement to bundles of devices, and from bundles to the devices of each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR, Place
from rlhf.interfaces.launcher import check_workers

_FRACTION = 10_000
"""Resources are counted in fractions of 1 / 10000, as Ray counts them."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The devices of one rank of a role that owns devices. All of them are reserved together, on one node."""

    role: str
    resources: Mapping[str, float]
    devices: int


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A living node of the cluster, or this machine."""

    id: str
    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The resources of one worker."""

    bundle: int
    """The bundle that is charged. The worker's devices may be in further bundles of the same node."""
    cpus: float
    """CPUs of that bundle that are charged for the worker."""
    slots: tuple[tuple[int, int], ...]
    """The worker's devices: (bundle, index of the device in the bundle)."""

    @property
    def threads(self) -> int:
        return len(self.slots)


def device_kind(nodes: Sequence[ClusterNode]) -> str:
    """``GPU`` if any node has one, else ``CPU``."""
    return "GPU" if any(node.resources.get("GPU", 0) > 0 for node in nodes) else "CPU"


def bundles_of(places: Mapping[str, Place], kind: str) -> list[Bundle]:
    """One bundle per rank of every role that owns devices, in the placement's order."""
    bundles = []
    for role, place in places.items():
        if place.share is None:
            resources = {"GPU": place.devices, "CPU": 1} if kind == "GPU" else {"CPU": place.devices}
            bundles += [Bundle(role, resources, place.devices)] * place.ranks
    return bundles


def check_fits(
    places: Mapping[str, Place], nodes: Sequence[ClusterNode], strategy: str = "PACK", label: str = "the cluster"
) -> None:
    """Raises ConfigError, with the calculation, if the placement does not fit on empty ``nodes``, or if GPUs would stay
    idle.

    Args:
        label: the name of the nodes in the message.
    """
    kind = device_kind(nodes)
    check_workers(places, "cuda" if kind == "GPU" else "cpu")
    bundles = bundles_of(places, kind)
    if problem := _problem(bundles, nodes, strategy):
        lines = [f"the placement does not fit on {label}: {problem}"]
        width = max(len(role) for role in places)
        for role, place in places.items():
            unit = "engines" if role == GENERATOR else "ranks"
            if place.share is None:
                sum_ = place.ranks * place.devices
                lines.append(f"  {role:{width}}  {place.ranks} {unit} x {place.devices} {kind}s = {sum_}")
            else:
                lines.append(f"  {role:{width}}  {place.ranks} {unit} on the devices of {place.share}")
        lines.append(f"  {'needed':{width}}  {sum(b.devices for b in bundles)} {kind}s")
        lines.append(f"  {'nodes':{width}}  {_listing(nodes, kind)}")
        if kind == "GPU":
            lines.append(f"  Each rank that owns devices also takes 1 CPU; available: {_listing(nodes, 'CPU')}")
        lines.append('Lower ranks or devices in [placement], share devices (share = "policy"), or use more nodes.')
        raise ConfigError("\n".join(lines))


def _problem(bundles: Sequence[Bundle], nodes: Sequence[ClusterNode], strategy: str) -> str:
    """Why no layout exists; empty if one exists. The largest bundles are placed first, each on the first node with
    room. Schedulers, too, miss a layout that this greedy order misses."""
    free = [dict(node.resources) for node in nodes]
    if strategy == "STRICT_PACK":
        total = {name: sum(b.resources.get(name, 0) for b in bundles) for name in ("GPU", "CPU")}
        if any(all(total[name] <= node.get(name, 0) for name in total) for node in free):
            return ""
        return "no node has room for all ranks, which launcher.strategy = 'STRICT_PACK' requires"
    if strategy == "STRICT_SPREAD" and len(bundles) > len(nodes):
        return (
            f"{len(bundles)} ranks own devices, and each needs a separate node (launcher.strategy = 'STRICT_SPREAD'), "
            f"but there are {len(nodes)} nodes"
        )
    for index, place in _layout(bundles, nodes, strategy):
        if place is None:
            bundle = bundles[index]
            return f"no node has room left for a rank of {bundle.role!r} with {bundle.devices} devices"
    return ""


def _layout(
    bundles: Sequence[Bundle], nodes: Sequence[ClusterNode], strategy: str = "PACK"
) -> Iterator[tuple[int, ClusterNode | None]]:
    """(position of a bundle, its node, or None if no node has room)."""
    free = [dict(node.resources) for node in nodes]
    for index in sorted(range(len(bundles)), key=lambda i: -bundles[i].devices):
        needs = bundles[index].resources
        for node, room in zip(nodes, free, strict=True):
            if all(room.get(name, 0) >= amount for name, amount in needs.items()):
                for name, amount in needs.items():
                    room[name] -= amount
                if strategy == "STRICT_SPREAD":
                    # The node takes no second rank.
                    room.clear()
                yield index, node
                break
        else:
            yield index, None


def assign(bundles: Sequence[Bundle], nodes: Sequence[ClusterNode]) -> list[str]:
    """The node id of each bundle, for launchers that choose nodes by themselves, after :func:`check_fits`."""
    nodes_of = {index: node.id for index, node in _layout(bundles, nodes) if node is not None}
    return [nodes_of[index] for index in range(len(bundles))]


def _listing(nodes: Sequence[ClusterNode], kind: str) -> str:
    amounts = ", ".join(f"{node.address} has {node.resources.get(kind, 0):g}" for node in nodes)
    return f"{sum(node.resources.get(kind, 0) for node in nodes):g} {kind}s: {amounts}"


def allocate(
    places: Mapping[str, Place], bundles: Sequence[Bundle], nodes: Sequence[str]
) -> dict[str, list[Allocation]]:
    """Allocations by role, in rank order.

    Ranks are ordered by node, so that neighbouring ranks are on the same node. A role that shares devices uses its
    host's devices in the same order: rank i has the i-th part.

    Args:
        nodes: the node of each bundle.
    """
    order: dict[str, list[int]] = {}
    for index in sorted(range(len(bundles)), key=lambda i: (nodes.index(nodes[i]), i)):
        order.setdefault(bundles[index].role, []).append(index)
    devices: dict[str, list[tuple[tuple[int, int], ...]]] = {}
    for role, place in places.items():
        host = places[place.share] if place.share else place
        slots = [(index, n) for index in order[place.share or role] for n in range(host.devices)]
        size = _devices_each(role, place, host)
        devices[role] = [tuple(slots[rank * size : (rank + 1) * size]) for rank in range(place.ranks)]
        for rank, part in enumerate(devices[role]):
            rank_nodes = {nodes[index] for index, _ in part}
            if len(rank_nodes) > 1:
                raise ConfigError(
                    f"[placement.{role}]: the {size} devices of rank {rank} would be on {len(rank_nodes)} nodes, "
                    f"because those of {place.share!r} are; one process can use only devices of one node. Lower its "
                    f"devices, give {place.share!r} more devices per rank, or give {role!r} devices of its own."
                )
    tenants = Counter(part[0][0] for ranks in devices.values() for part in ranks)

    def cpus(bundle: int) -> float:
        # Rounded down: tenants that together need more than the bundle has could not all start.
        return int(bundles[bundle].resources["CPU"] / tenants[bundle] * _FRACTION) / _FRACTION

    return {role: [Allocation(part[0][0], cpus(part[0][0]), part) for part in ranks] for role, ranks in devices.items()}


def _devices_each(role: str, place: Place, host: Place) -> int:
    """Number of devices of one rank. A rank of a sharing role has as many as a rank of its host, or fewer if the role
    has more ranks than its host."""
    if place.share is None or role == GENERATOR:
        return place.devices
    return max(1, min(host.devices, host.ranks * host.devices // place.ranks))
