"""Assigns roles to devices. Devices that hold the same roles form one group."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf.interfaces.launcher import GENERATOR, Place
from rlhf.interfaces.memory import EngineMemory, ModelSize, TrainerMemory
from rlhf_runtime.checkpoint.store import STATE_BYTES

from rlhf_cli.plan.row_lengths import Lengths

HOST, DEVICE = "host", "device"
"""Homes of groups that belong to no role: the host of CPUs, and the device of a run in one process."""


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """One model role."""

    name: str
    place: Place
    size: ModelSize
    memory: TrainerMemory
    """Memory of one rank."""
    trained: bool
    longest: int
    """Tokens of the longest sequence."""
    gradient_checkpointing: bool = False
    annotates: bool = True
    """It computes something without gradient, before the update or for rewards."""
    rewards: bool = False
    """Whether it scores samples, and so computes while they are generated."""
    precomputed: bool = False
    """It computes before any other role is loaded, and is then removed."""
    borrowed: int = 0
    """Size in bytes of the copies of other roles' output heads on each rank."""


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The generator's engines."""

    place: Place
    size: ModelSize
    memory: EngineMemory
    """Memory of one device."""
    longest: int
    """Tokens of the longest sequence, prompt and answer."""
    devices: int = 1
    """Devices that one engine uses: tensor parallel x pipeline parallel."""
    bucket: int = 2**28
    """Number of bytes of weights that a sync sends at once."""
    mapped: bool = False
    """Whether ranks of the policy and engines map the same memory on shared devices, with two buckets on each
    device."""
    canaries: bool = True
    """Whether the engine scores a few sequences after a sync, for which it needs its cache."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine for which the run is planned."""

    device: str = "cpu"
    """``cpu`` | ``cuda``. On CPUs all ranks share the memory of one host."""
    memory: int | None = None
    """Memory in bytes of one device (on CPUs: of the host); None: unknown, so there is no verdict."""
    host_memory: int | None = None
    """Host memory in bytes per :attr:`devices_per_node` devices; None: its use is shown without a verdict."""
    devices_per_node: int = 8
    processes: bool = False
    """Whether every rank is a separate process; otherwise the whole run is one process."""


@dataclass(frozen=True, slots=True)
class View:
    """A frozen role that is another role's model with its adapters switched off, computed on that role's devices."""

    base_role: str
    place: Place
    """Devices that are reserved for it although it does not use them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that determines the memory of a run."""

    roles: tuple[RoleLayout, ...]
    """Roles that hold a model. The work of their views is included."""
    engines: EngineLayout | None
    machine: Machine
    views: Mapping[str, View] = field(default_factory=dict)
    """{role: view}."""
    lengths: Lengths | None = None
    """Lengths of the sequences that the plan assumes; None: the layout does not come from a run file."""
    most_checkpoints: int = 1
    """The largest number of checkpoints at a time."""

    @property
    def places(self) -> dict[str, Place]:
        places = {role.name: role.place for role in self.roles}
        places |= {name: view.place for name, view in self.views.items()}
        return places if self.engines is None else {**places, GENERATOR: self.engines.place}

    @property
    def checkpoint(self) -> int:
        """Size of a checkpoint in bytes, with the state of an optimizer with two moments."""
        return STATE_BYTES * sum(role.memory.trained for role in self.roles if role.trained)

    def role(self, name: str) -> RoleLayout:
        return next(r for r in self.roles if r.name == name)

    @property
    def devices(self) -> int:
        """Number of devices of the whole run; 1 if it is one process."""
        if not self.machine.processes:
            return 1
        return sum(p.ranks * p.devices for p in self.places.values() if p.share is None)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that hold the same parts."""

    home: str
    """The role that the devices belong to."""
    first: int
    last: int
    """First and last number among the devices of ``home``, inclusive."""
    holds: Mapping[str, int] = field(default_factory=dict)
    """{role: ranks, or parts of engines, on each of these devices}."""

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def title(self) -> str:
        if self.home in (HOST, DEVICE):
            return self.home
        numbers = f"{self.first}" if self.count == 1 else f"{self.first}-{self.last}"
        return f"{self.home} {numbers}"


def devices_each(places: Mapping[str, Place], name: str) -> int:
    """Number of devices of one rank. A role that shares devices has as many per rank as the role with which it shares,
    or fewer if it has more ranks."""
    place = places[name]
    if place.share is None or name == GENERATOR:
        return place.devices
    host = places[place.share]
    return max(1, min(host.devices, host.ranks * host.devices // place.ranks))


def device_groups(places: Mapping[str, Place], machine: Machine, views: Collection[str] = ()) -> list[DeviceGroup]:
    """Every device of the run; neighbours that hold the same roles are one group. On CPUs, or in one process, there is
    one group with all ranks.

    A rank of a role holds its model on the first of its devices; an engine is spread over all of its devices.

    Args:
        views: roles that hold no model. Devices that are reserved for such a role only are left out.
    """
    holders = {name: place for name, place in places.items() if name not in views}
    if machine.device == "cpu" or not machine.processes:
        home = HOST if machine.device == "cpu" else DEVICE
        return [DeviceGroup(home, 0, 0, {name: place.ranks for name, place in holders.items()})]
    groups = []
    for home, host in places.items():
        group_places = {name: place for name, place in holders.items() if home in (name, place.share)}
        if host.share is not None or not group_places:
            continue
        slots: list[dict[str, int]] = [{} for _ in range(host.ranks * host.devices)]
        for name, place in group_places.items():
            size = devices_each(places, name)
            for rank in range(place.ranks):
                numbers = range(rank * size, rank * size + (size if name == GENERATOR else 1))
                for number in numbers:
                    slots[number][name] = slots[number].get(name, 0) + 1
        groups += _equal_devices(home, slots)
    return groups


def _equal_devices(home: str, slots: Sequence[Mapping[str, int]]) -> list[DeviceGroup]:
    groups: list[DeviceGroup] = []
    for number, holds in enumerate(slots):
        if groups and groups[-1].holds == holds:
            groups[-1] = DeviceGroup(home, groups[-1].first, number, holds)
        else:
            groups.append(DeviceGroup(home, number, number, dict(holds)))
    return groups
