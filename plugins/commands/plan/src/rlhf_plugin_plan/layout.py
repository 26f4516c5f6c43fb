"""Who is on which device: plain values in, groups of devices that hold the same parts out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf.interfaces.launcher import GENERATOR, Place
from rlhf.interfaces.memory import Footprint, Sharding

from rlhf_plugin_plan.shape import ModelShape

HOST, DEVICE = "host", "device"
"""Homes of groups that no role owns: the host of CPUs, and the device of a run in one process."""


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """A model role, resolved: what one of its ranks computes with."""

    name: str
    place: Place
    shape: ModelShape
    sharding: Sharding
    trained: bool
    micro_tokens: int
    """Most tokens that a micro-batch computes; a longer unit is alone in one, so it is no less than the longest unit. A
    prefix that sequences share counts once."""
    longest: int
    """Tokens of the longest sequence."""
    gradient_checkpointing: bool = False
    outputs: tuple[str, ...] = ("logprobs",)
    """What its loss reads of it."""
    annotated: tuple[str, ...] = ("logprobs",)
    """What it computes without gradient, before the update or for rewards; empty: nothing."""
    rewards: bool = False
    """It scores samples, so it computes while they are generated."""
    repeats: float = 1.0
    """Tokens of a micro-batch's sequences for each one that is computed: more than 1 where they share prefixes."""
    precomputed: bool = False
    """It computes before any other role is loaded, and goes."""
    borrowed: int = 0
    """Bytes of copies of other roles' output heads on each of its ranks."""

    @property
    def trained_parameters(self) -> int:
        if not self.trained:
            return 0
        s = self.sharding
        if s.adapter_rank:
            own = 0 if self.shape.outputs == self.shape.vocabulary else self.shape.head
            return self.shape.adapter_parameters(s.adapter_rank, s.adapter_targets) + own
        return self.shape.parameters

    @property
    def trained_matrices(self) -> int:
        """Of the trained parameters, those in matrices of the layers; an adapter is two of them."""
        if not self.trained:
            return 0
        s = self.sharding
        return (
            self.shape.adapter_parameters(s.adapter_rank, s.adapter_targets) if s.adapter_rank else self.shape.matrices
        )

    @property
    def scattered_parameters(self) -> int:
        """Of the trained ones, those whose gradient and optimizer state are small tensors of their own."""
        if self.sharding.flat:
            return 0
        return self.trained_parameters if self.sharding.adapter_rank else min(self.shape.small, self.trained_parameters)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The generator's engines."""

    place: Place
    shape: ModelShape
    footprint: Footprint
    samples: int
    """Drawn at once on one engine at most: of its share of the step's prompts."""
    longest: int
    """Tokens of the longest sequence, prompt and answer."""
    prompt_tokens: int = 2**62
    """Of their prompts that are computed: the distinct ones, where the engine can do that."""
    bf16: bool = False
    bucket: int = 2**28
    """Bytes of weights sent at once in a sync."""
    canaries: bool = True
    """After a sync it scores a few sequences, so its cache is there too."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the run is planned for."""

    device: str = "cpu"
    """``cpu`` | ``cuda``. On CPUs all ranks share the memory of one host."""
    memory: int | None = None
    """Bytes of one device, on CPUs of the host; None: unknown, so nothing is judged."""
    host_memory: int | None = None
    """Bytes of the host of :attr:`devices_per_node` devices, for what is kept there; None: stated, not judged."""
    devices_per_node: int = 8
    processes: bool = False
    """Every rank is a process of its own; else all is one process."""


@dataclass(frozen=True, slots=True)
class View:
    """A frozen role that holds no model: it is another role's without its adapters, computed where that one is."""

    of: str
    place: Place
    """Devices that are kept for it all the same."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A run, resolved, as far as memory depends on it."""

    roles: tuple[RoleLayout, ...]
    """Those that hold a model; what their views compute is among what they compute."""
    engines: EngineLayout | None
    machine: Machine
    views: Mapping[str, View] = field(default_factory=dict)
    """By role."""

    @property
    def places(self) -> dict[str, Place]:
        found = {role.name: role.place for role in self.roles}
        found |= {name: view.place for name, view in self.views.items()}
        return found if self.engines is None else {**found, GENERATOR: self.engines.place}

    def role(self, name: str) -> RoleLayout:
        return next(r for r in self.roles if r.name == name)

    @property
    def devices(self) -> int:
        """Of the whole run: those of the places that own devices; one where all is one process."""
        if not self.machine.processes:
            return 1
        return sum(p.ranks * p.devices for p in self.places.values() if p.share is None)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that hold the same parts."""

    home: str
    """The role that owns them."""
    first: int
    last: int
    """Numbers among the devices of ``home``, inclusive."""
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
    """Devices of one rank. A role that shares has as many as a rank of its host, or fewer where it has more ranks."""
    place = places[name]
    if place.share is None or name == GENERATOR:
        return place.devices
    host = places[place.share]
    return max(1, min(host.devices, host.ranks * host.devices // place.ranks))


def device_groups(places: Mapping[str, Place], machine: Machine, views: Collection[str] = ()) -> list[DeviceGroup]:
    """Every device of the run, neighbours with equal contents together. On CPUs, or where all is one process: one group
    with all ranks.

    A rank of a role holds its model on the first of its devices; an engine is spread over all of its devices.

    Args:
        views: roles that hold nothing; devices that are kept for nobody else are left out.
    """
    holders = {name: place for name, place in places.items() if name not in views}
    if machine.device == "cpu" or not machine.processes:
        home = HOST if machine.device == "cpu" else DEVICE
        return [DeviceGroup(home, 0, 0, {name: place.ranks for name, place in holders.items()})]
    groups = []
    for home, host in places.items():
        mine = {name: place for name, place in holders.items() if home in (name, place.share)}
        if host.share is not None or not mine:
            continue
        slots: list[dict[str, int]] = [{} for _ in range(host.ranks * host.devices)]
        for name, place in mine.items():
            each = devices_each(places, name)
            for rank in range(place.ranks):
                held = range(rank * each, rank * each + (each if name == GENERATOR else 1))
                for number in held:
                    slots[number][name] = slots[number].get(name, 0) + 1
        groups += _alike(home, slots)
    return groups


def _alike(home: str, slots: Sequence[Mapping[str, int]]) -> list[DeviceGroup]:
    found: list[DeviceGroup] = []
    for number, holds in enumerate(slots):
        if found and found[-1].holds == holds:
            found[-1] = DeviceGroup(home, found[-1].first, number, holds)
        else:
            found.append(DeviceGroup(home, number, number, dict(holds)))
    return found
