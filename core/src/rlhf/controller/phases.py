"""The hybrid engine: roles and engines on the same devices take turns with the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlhf.controller.precompute import PrecomputedRole
from rlhf.controller.roles import Role
from rlhf.interfaces import GENERATOR, Generator, Place
from rlhf.placement import neighbours


class Phases:
    """Where the generator shares devices: it sleeps while others compute, and its neighbours put aside what they do not
    need while it generates, above all optimizer states. Weights stay: a reward model may score between two turns."""

    def __init__(self, generator: Generator, roles: Mapping[str, Role], places: Mapping[str, Place]) -> None:
        self.generator = generator
        shared = neighbours(places, GENERATOR)
        here = [roles[name] for name in shared if name in roles and not isinstance(roles[name], PrecomputedRole)]
        self.neighbours = list({id(role.group): role for role in here}.values())  # two roles may be views of one model
        self.active = bool(shared)
        self._aside = False
        """Whether it is."""
        self._together = False
        if self.active:
            generator.sleep()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The time in which samples are drawn and scored."""
        if not self.active:
            yield
            return
        self.begin_sync()
        self.generator.wake()
        try:
            yield
        finally:
            if not self._together:
                self.begin_learning()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Between the times of generating inside, nobody takes turns; where there are none, nobody wakes."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self.begin_learning()

    def begin_sync(self) -> None:
        """New weights are about to wake the generator. What makes room for them stays aside until the next learning, as
        generating mostly comes before that."""
        if self.active and not self._aside:
            for role in self.neighbours:
                role.every("offload")
            self._aside = True

    def begin_learning(self) -> None:
        """The devices belong to the roles again, with all that they put aside."""
        if self.active and self._aside:
            self.generator.sleep()
            for role in self.neighbours:
                role.every("reload")
            self._aside = False
