"""The launcher ``local``: every role is in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import Generator, GeneratorSpec, Launcher, ModelSpec, Place, Trainer, WorkerGroup
from rlhf.plugins import Resolved

from rlhf_plugin_local.short_waits import ShortWaits, applicable


class LocalGroup(WorkerGroup):
    """One rank: the trainer itself."""

    size = 1

    def __init__(self, trainer: Trainer) -> None:
        self.worker = trainer

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        if len(per_rank) != 1:
            raise CapabilityError(
                f"a local group has 1 rank, but {method}() was called with arguments for {len(per_rank)}"
            )
        return [getattr(self.worker, method)(*per_rank[0])]

    def stream(self, method: str, *arguments: Any, timeout: float | None = None) -> Iterator[Any]:
        """Calls in this process cannot time out, so ``timeout`` is ignored."""
        return iter(getattr(self.worker, method)(*arguments))


class LocalLauncher(Launcher):
    """No processes and no copies. Threads of torch wait only briefly for each other while other processes use the
    cores."""

    name = "local"
    capabilities: ClassVar[frozenset[str]] = frozenset({"in_process", "export:module"})
    _waits: ShortWaits | None = None

    @classmethod
    def check(cls, config: Any, places: Mapping[str, Place], generator: type[Generator] | None, transport: str) -> None:
        super().check(config, places, generator, transport)
        cls._check_places(places)
        ranks = os.environ.get("WORLD_SIZE", "1")
        if "TORCHELASTIC_RUN_ID" in os.environ and ranks != "1":
            raise ConfigError(
                f"torchrun started this process as rank {os.environ.get('RANK', '?')} of {ranks}, but launcher 'local' "
                "trains in one process: every process of torchrun would be a whole run. Start `rlhf train` once, "
                "without torchrun. Use --launcher.use processes for several ranks, or ray for several machines."
            )

    def place(self, places: Mapping[str, Place], plugins: Sequence[Resolved] = (), reports: Path | None = None) -> None:
        self._check_places(places)

    @staticmethod
    def _check_places(places: Mapping[str, Place]) -> None:
        """Refuse sections with more than one rank or device, because everything shares this process."""
        for name, place in places.items():
            if place.ranks != 1 or place.devices != 1:
                raise ConfigError(
                    f"[placement.{name}] asks for {place.ranks} ranks of {place.devices} devices; launcher 'local' has "
                    "one process and one device. Use --launcher.use processes (this machine) or ray (a cluster), or "
                    "remove the section."
                )

    def launch_trainer(self, trainer: type[Trainer], config: Any, spec: ModelSpec) -> LocalGroup:
        if spec.world_size != 1:
            raise CapabilityError(
                f"launcher 'local' has one rank, but role {spec.role.name!r} asks for {spec.world_size}: use a "
                "launcher for several processes"
            )
        if self._waits is None and applicable():
            self._waits = ShortWaits()
            self._waits.start()
        return LocalGroup(trainer(config, spec))

    def launch_generator(
        self,
        generator: type[Generator],
        config: Any,
        spec: GeneratorSpec,
        policy: WorkerGroup | None = None,
        refresh: Callable[[], object] | None = None,
    ) -> Generator:
        return generator(config, spec)

    def shutdown(self) -> None:
        if self._waits is not None:
            self._waits.close()
            self._waits = None
