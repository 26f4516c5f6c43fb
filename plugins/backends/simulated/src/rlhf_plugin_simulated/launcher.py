"""The launcher ``simulated``: everything runs in this process, regardless of the placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import Generator, GeneratorSpec, Launcher, ModelSpec, Place, TakesTensors, Trainer, WorkerGroup
from rlhf.plugins import Resolved

from rlhf_plugin_simulated.generator import SimulatedGenerator
from rlhf_plugin_simulated.pool import SimulatedPool


class SimulatedGroup(WorkerGroup):
    """One rank."""

    size = 1

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        [arguments] = per_rank
        return [getattr(self._trainer, method)(*arguments)]

    def stream(self, method: str, *arguments: Any, timeout: float | None = None) -> Iterator[Any]:
        return iter(getattr(self._trainer, method)(*arguments))


class SimulatedLauncher(Launcher):
    """Reserves nothing. The generator ``simulated`` is a pool here, so it also serves a continuous stream."""

    name = "simulated"
    capabilities: ClassVar[frozenset[str]] = frozenset({"in_process", "answers"})

    @classmethod
    def check(cls, config: Any, places: Mapping[str, Place], generator: type[Generator] | None, transport: str) -> None:
        super().check(config, places, generator, transport)
        if generator is not None and not issubclass(generator, TakesTensors):
            raise CapabilityError(
                f"generator {generator.name!r} samples from a trainer's module, which launcher 'simulated' does not "
                "provide. Set --generator.use simulated, or --launcher.use local."
            )
        for name, place in places.items():
            if place.ranks != 1 or place.devices != 1:
                raise ConfigError(
                    f"[placement.{name}] asks for {place.ranks} ranks of {place.devices} devices; launcher 'simulated' "
                    "reserves none. Remove the section; --generator.engines says how many engines are simulated."
                )

    def place(self, places: Mapping[str, Place], plugins: Sequence[Resolved] = (), reports: Path | None = None) -> None:
        """Nothing is reserved."""

    def launch_trainer(self, trainer: type[Trainer], config: Any, spec: ModelSpec) -> SimulatedGroup:
        return SimulatedGroup(trainer(config, spec))

    def launch_generator(
        self,
        generator: type[Generator],
        config: Any,
        spec: GeneratorSpec,
        policy: WorkerGroup | None = None,
        refresh: Callable[[], object] | None = None,
    ) -> Generator:
        return (SimulatedPool if generator is SimulatedGenerator else generator)(config, spec)
