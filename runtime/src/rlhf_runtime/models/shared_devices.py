"""The hybrid engine: roles and engines on the same devices use the memory in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from rlhf.errors import RlhfError
from rlhf.interfaces import GENERATOR, Generator, Place

from rlhf_runtime.config.placement import neighbours
from rlhf_runtime.models.precompute import PrecomputedRole
from rlhf_runtime.models.roles import Role


class Phases:
    """Says who has the devices that the generator shares. The generator sleeps while roles compute. While it generates,
    the roles on its devices put aside what they do not need then, above all optimizer states. Weights stay, because a
    reward model may score between two turns. Nothing happens where the generator shares no devices."""

    def __init__(self, generator: Generator, roles: Mapping[str, Role], places: Mapping[str, Place]) -> None:
        self.generator = generator
        shared = neighbours(places, GENERATOR) if GENERATOR in places else []
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
        with self._then_learning(here=not self._together):
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Between the times of generating inside, nobody takes turns; where there are none, nobody wakes."""
        self._together = True
        with self._then_learning():
            try:
                yield
            finally:
                self._together = False

    def begin_sync(self) -> None:
        """New weights are about to wake the generator. What makes room for them stays aside until the next learning, as
        generating mostly comes before that."""
        if self.active and not self._aside:
            for role in self.neighbours:
                role.every("offload")
            self._aside = True

    def begin_learning(self) -> None:
        """The devices belong to the roles again, with all that they put aside. Where one of them is gone, the others
        get theirs all the same, as they may be saved; what it raised is raised then."""
        if not (self.active and self._aside):
            return
        self._aside = False
        failed: list[RlhfError] = []
        turns: list[Callable[[], object]] = [partial(role.every, "reload") for role in self.neighbours]
        for turn in (self.generator.sleep, *turns):
            try:
                turn()
            except RlhfError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    @contextmanager
    def _then_learning(self, here: bool = True) -> Iterator[None]:
        """Learning begins after what is inside, ``here``: also where that fails, and its error is the one to see."""
        try:
            yield
        except BaseException:
            with suppress(RlhfError):
                if here:
                    self.begin_learning()
            raise
        if here:
            self.begin_learning()
