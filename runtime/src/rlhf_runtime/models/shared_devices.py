"""Hybrid engine: roles and engines on the same devices take turns in using the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

from rlhf.errors import RlhfError
from rlhf.interfaces import GENERATOR, Generator, Place, Sleeps

from rlhf_runtime.config.placement import neighbours
from rlhf_runtime.models.precompute import PrecomputedRole
from rlhf_runtime.models.roles import Role


class Phases:
    """Decides whether the generator or the roles use the devices that they share. The generator sleeps while roles
    compute. While it generates, the roles on its devices offload state that they do not need, mainly optimizer states.
    Weights stay on the device, because a reward model may score between two turns. Nothing happens if the generator
    shares no devices."""

    def __init__(
        self,
        generator: Generator,
        roles: Mapping[str, Role],
        places: Mapping[str, Place],
        refresh: Callable[[], object],
    ) -> None:
        """
        Args:
            roles: roles that can offload.
            refresh: sends the current weights to the generator, which may discard them while it sleeps.
        """
        self._sleeper, self._refresh = generator if isinstance(generator, Sleeps) else None, refresh
        shared = neighbours(places, GENERATOR) if GENERATOR in places else []
        peers = [roles[name] for name in shared if name in roles and not isinstance(roles[name], PrecomputedRole)]
        self.neighbours = list({id(role.group): role for role in peers}.values())  # two roles may be views of one model
        self.active = bool(shared)
        self._offloaded = False
        """Whether the roles have made room for the generator."""
        self._stays_awake = False
        # Engines start awake, but the roles use the devices until the first sync.
        if self.active:
            self._sleep()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Context in which samples are drawn and scored."""
        if not self.active:
            yield
            return
        self.begin_sync()
        if self._sleeper is not None and self._sleeper.wake():
            self._refresh()
        with nullcontext() if self._stays_awake else self._then_learning():
            yield

    @contextmanager
    def stay_awake(self) -> Iterator[None]:
        """Context in which the generator stays awake between calls of :meth:`generating`. Without such calls it does
        not wake."""
        self._stays_awake = True
        with self._then_learning():
            try:
                yield
            finally:
                self._stays_awake = False

    def begin_sync(self) -> None:
        """Make room for new weights, which wake the generator. The roles stay offloaded until they learn again, because
        generation usually comes before that."""
        if self.active and not self._offloaded:
            for role in self.neighbours:
                role.every("offload")
            self._offloaded = True

    def begin_learning(self) -> None:
        """Give the devices back to the roles, which reload their offloaded state. If a role fails, the others still
        reload, because they may be saved. The error is raised afterwards."""
        if not (self.active and self._offloaded):
            return
        self._offloaded = False
        failed: list[RlhfError] = []
        turns: list[Callable[[], object]] = [partial(role.every, "reload") for role in self.neighbours]
        # The engine first, because the roles reload into the memory that it frees.
        for turn in (self._sleep, *turns):
            try:
                turn()
            except RlhfError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _sleep(self) -> None:
        if self._sleeper is not None:
            self._sleeper.sleep()

    @contextmanager
    def _then_learning(self) -> Iterator[None]:
        """Call :meth:`begin_learning` after the body, also if the body fails. The body's error is raised."""
        try:
            yield
        except BaseException:
            with suppress(RlhfError):
                self.begin_learning()
            raise
        self.begin_learning()
