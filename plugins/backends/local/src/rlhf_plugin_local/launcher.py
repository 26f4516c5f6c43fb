"""The launcher ``local``: every role in this process, called directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rlhf.errors import CapabilityError
from rlhf.interfaces import Generator, Launcher, ModelSpec, Trainer, WorkerGroup


class LocalGroup(WorkerGroup):
    """One rank: the trainer itself."""

    size = 1

    def __init__(self, trainer: Trainer) -> None:
        self.worker = trainer

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        if len(per_rank) != 1:
            raise CapabilityError(f"a local group has 1 rank, {method}() was called with arguments for {len(per_rank)}")
        return [getattr(self.worker, method)(*per_rank[0])]


class LocalLauncher(Launcher):
    """No processes, no copies, nothing to shut down."""

    name = "local"
    capabilities: ClassVar[frozenset[str]] = frozenset({"in_process", "export:module"})

    def launch_trainer(self, trainer: type[Trainer], config: Any, spec: ModelSpec) -> LocalGroup:
        if spec.world_size != 1:
            raise CapabilityError(
                f"launcher 'local' has one rank, role {spec.role.name!r} asks for {spec.world_size}: use a launcher "
                "for several processes"
            )
        return LocalGroup(trainer(config, spec))

    def launch_generator(self, build: Callable[[], Generator]) -> Generator:
        return build()
