"""The hybrid engine: roles and engines on the same devices take turns with the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlhf.controller.roles import Role
from rlhf.interfaces import GENERATOR, Generator, Place
from rlhf.placement import neighbours


class Phases:
    """Where the generator shares devices: it sleeps while others compute, and trained neighbours put their optimizer
    states aside while it generates. Their weights stay: a reward model may score between two turns."""

    def __init__(self, generator: Generator, roles: Mapping[str, Role], places: Mapping[str, Place]) -> None:
        self.generator = generator
        shared = neighbours(places, GENERATOR)
        self.trained = [roles[name] for name in shared if name in roles and roles[name].spec.role.trained]
        self.active = bool(shared)
        if self.active:
            generator.sleep()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The time in which samples are drawn and scored."""
        if not self.active:
            yield
            return
        for role in self.trained:
            role.every("offload")
        self.generator.wake()
        try:
            yield
        finally:
            self.generator.sleep()
            for role in self.trained:
                role.every("reload")
