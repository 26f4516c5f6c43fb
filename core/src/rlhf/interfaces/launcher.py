"""Launchers: start workers and assign their devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.errors import ConfigError
from rlhf.interfaces.component import Component
from rlhf.interfaces.generator import Generator, TakesTensors
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.interfaces.model import ModelSpec
from rlhf.interfaces.trainer import Trainer

if TYPE_CHECKING:
    from rlhf.plugins.resolved import Resolved
    from rlhf.types import GenerationRequest, Turn

GENERATOR = "generator"
"""The name of the engines in a placement, beside the names of roles."""


@dataclass(frozen=True, slots=True)
class Place:
    """Processes and devices of one role, or of the generator's engines: the run file's ``[placement.NAME]``."""

    ranks: int = 1
    """Processes of a role; engines of the generator."""
    devices: int = 1
    """Devices per rank: GPUs, or CPU cores where there are none."""
    share: str | None = None
    """Use the devices of this role; None: devices of its own."""
    workers: int | None = None
    """Workers of one engine, each on its own device (``Generator.parallel_sizes``). None for a model role, and for an
    engine in this process."""


def check_workers(places: Mapping[str, Place], device: str) -> None:
    """Raises ConfigError if GPUs of an engine would stay idle. On a CPU, extra cores are threads of its workers.

    Args:
        device: ``cpu`` | ``cuda``, the kind of the places' devices.
    """
    place = places.get(GENERATOR)
    if device == "cuda" and place is not None and place.workers is not None and place.workers < place.devices:
        raise ConfigError(
            f"[placement.generator]: each engine has devices = {place.devices} GPUs but only {place.workers} workers "
            f"(tensor x pipeline parallel size), one per GPU, so {place.devices - place.workers} GPUs would be idle. "
            f"Set placement.generator.devices = {place.workers}, with more ranks for more engines, or raise the "
            f"generator's parallel sizes to a product of {place.devices}."
        )


class WorkerGroup(ABC):
    """The ranks of one role."""

    size: int
    worker: Any = None
    """The worker itself, if it is the only one and runs in this process."""

    @abstractmethod
    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call ``method`` on every rank, rank i with ``per_rank[i]``. Results are in rank order.

        The tensors of micro-batches are views of larger ones. pickle would send the whole storage with each of them.
        """

    def begin(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """:meth:`call` without waiting. Returns a function that waits for the results. Calls run in order."""
        results = self.call(method, per_rank)
        return lambda: results

    @abstractmethod
    def stream(self, method: str, *arguments: Any, timeout: float | None = None) -> Iterator[Any]:
        """Call a generator method on every rank, and yield the items of rank 0: as values, or as handles that groups
        and generators of the same launcher accept in place of values.

        Args:
            timeout: largest number of seconds between two items; then TrainingError.
        """

    def send_buckets(self, view: str, limit: int, timeout: float | None = None) -> Iterator[Any]:
        """:meth:`stream` the trainer's ``buckets`` to the generator, over the link between the two if there is
        one. Each item is for ``take`` or ``stale`` of the generator that the same launcher launched.

        Args:
            limit: bytes of one bucket.
            timeout: seconds between two items; TrainingError when it is over.
        """
        return self.stream("buckets", view, limit, timeout=timeout)

    def value(self, item: Any) -> Any:
        """The value of an item of :meth:`stream`: the item itself, or the value behind the handle. Read-only."""
        return item

    def peak_memory(self) -> list[dict[str, int]]:
        """:func:`rlhf.process_memory.peak_memory` of the process of each rank; empty for ranks in this process."""
        return []

    def shutdown(self) -> None:  # noqa: B027 - nothing to release is a valid answer
        """Release the workers."""


class EnginePool(TakesTensors, Generator):
    """Engines behind one generator, created by a launcher. Each request goes to one engine, weights go to all. It also
    answers single requests (``stream.mode = "continuous"``) if its engines are
    :class:`rlhf.interfaces.generator.AnswersRequests`."""

    @abstractmethod
    async def answer(self, request: GenerationRequest) -> Turn:
        """One sampled turn. Other requests and the training of the policy continue meanwhile. It is awaited on an event
        loop outside the main thread; the other methods are called on the main thread. Cancelling the call drops the
        sample."""

    @abstractmethod
    def pause(self) -> None:
        """Stop sampling for requests of :meth:`answer` until :meth:`resume`. Weights are loaded and proven meanwhile.
        With ``in_flight = "drain"`` it first waits until all unfinished requests are answered. Calls may be nested."""

    @abstractmethod
    def resume(self) -> None:
        """Continue after :meth:`pause`."""

    def repair(self) -> None:
        """Replace engines that died since the last call, so that requests of :meth:`answer` continue. Called repeatedly
        on the main thread while it waits for samples."""
        return

    def idle(self) -> tuple[float, float] | None:
        """(engine seconds without a request, engine seconds) since the last call; None: unknown. Called on the main
        thread."""
        return None

    def unfinished_tokens(self) -> int:
        """Tokens sampled so far for unanswered requests; 0: unknown. Called on any thread."""
        return 0

    def restarted(self) -> Mapping[str, int]:
        """{reason: tokens} that requests of :meth:`answer` sampled and discarded since the last call, because their
        samples were restarted: ``weights`` (``in_flight = "restart"``), ``engine`` (it died). Called on the main
        thread."""
        return {}


class Launcher(Component):
    """Starts trainers and generators. The controller gets the same kind of worker group wherever they run."""

    capabilities: ClassVar[frozenset[str]] = frozenset()
    """``ranks:many``, ``processes`` (workers run outside of this process), ``answers`` (its generator is an
    :class:`EnginePool`), ``export:module`` (:attr:`WorkerGroup.worker` of one rank is the trainer), ..."""

    @classmethod
    def is_local(cls, config: Any) -> bool:
        """Whether its workers run on this machine, as far as is known before the start. Only then do trainers and
        generators check options against the machine (:meth:`Trainer.check`, :meth:`Generator.check`)."""
        return True

    @classmethod
    def check(cls, config: Any, places: Mapping[str, Place], generator: type[Generator] | None, transport: str) -> None:
        """Before anything starts, refuse options that :meth:`place`, :meth:`choose_link` and the launches would refuse
        on every cluster, with the same messages. The default refuses a ``transport``.

        Args:
            generator: that of the run; None: it has none.
            transport: the run file's ``sync.transport``.

        Raises ConfigError or CapabilityError.
        """
        if generator is not None:
            cls._check_transport(transport)

    @classmethod
    def _check_transport(cls, transport: str) -> None:
        if transport != "auto":
            raise ConfigError(
                f"sync.transport = {transport!r}: launcher {cls.name!r} passes weights within one process. Remove "
                "sync.transport."
            )

    @abstractmethod
    def place(self, places: Mapping[str, Place], plugins: Sequence[Resolved] = (), reports: Path | None = None) -> None:
        """Reserve devices. Called once, before anything is launched.

        Args:
            places: by role name; :data:`GENERATOR` for the engines, if there are any.
            plugins: the run's plugins; every launched process must have the same versions.
            reports: folder for reports about failures; None: the working directory.

        Raises ConfigError, with the arithmetic, if the places do not fit.
        """

    @abstractmethod
    def launch_trainer(self, trainer: type[Trainer], config: Any, spec: ModelSpec) -> WorkerGroup:
        """``ranks`` workers of the role ``spec.role.name``, each ``trainer(config, spec)`` with its own rank."""

    @abstractmethod
    def launch_generator(
        self,
        generator: type[Generator],
        config: Any,
        spec: GeneratorSpec,
        policy: WorkerGroup | None = None,
        refresh: Callable[[], object] | None = None,
    ) -> Generator:
        """The generator, or an :class:`EnginePool` in front of several engines.

        Args:
            policy: the ranks whose weights it samples from. If :meth:`choose_link` chose a link,
                ``policy.send_buckets`` uses it from then on.
            refresh: sends the current weights again after an engine was replaced. None: nothing can send them, so the
                death of an engine ends the run.
        """

    def choose_link(self, generator: type[Generator], transport: str) -> None:
        """Choose how the policy's weights reach the generator. Called once, after :meth:`place` and before anything is
        launched.

        Args:
            transport: the run file's ``sync.transport``; ConfigError if it is not possible.
        """
        self._check_transport(transport)

    def shutdown(self) -> None:
        """Release everything that was launched."""
