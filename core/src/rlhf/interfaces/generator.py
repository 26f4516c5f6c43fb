"""Generators: sample tokens with log-probs and take new weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.errors import CapabilityError
from rlhf.interfaces.component import Component, ComponentConfig
from rlhf.interfaces.memory import EngineMemory, Held, ModelSize, SamplingWork
from rlhf.types import GenerationRequest, Sampling, Turn

if TYPE_CHECKING:
    from rlhf.weights.bucket import Bucket


@dataclass(frozen=True, slots=True)
class GeneratorSpec:
    """What a generator samples from and for: the run file's ``[policy]`` and ``[data]``, resolved. It is pickled where
    engines live in other processes, ``decode`` included."""

    eos_token_ids: tuple[int, ...]
    """Every token that ends a text."""
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text, for stop strings and ``Turn.text``."""
    path: str = ""
    """Folder or hub name of the policy's model, for generators that hold a copy of it."""
    dtype: str = "auto"
    """``auto`` | ``fp32`` | ``bf16``, the policy's."""
    trust_remote_code: bool = False
    max_tokens: int = 2048
    """Longest sequence, prompt and answer together."""
    seed: int = 0
    sync_timeout: float = 600.0
    """Seconds for one bucket of weights to be taken."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What a generator shows after taking weights."""

    version: int
    who: str = "the generator"
    """Which engine, and which of its workers, in messages."""
    nbytes: int = 0
    received: Mapping[str, str] = field(default_factory=dict)
    """{tensor name: fingerprint of the bytes as they arrived}, computed by the receiver (``accept:tensors``)."""
    dtype: str = ""
    """``fp32`` | ``bf16``: the arithmetic of sampling; empty: the trainer's own."""
    detail: str = ""


class Generator(Component):
    """Samples are a function of (weights, ids, seed, sampling); neighbours in the batch do not enter beyond
    floating-point rounding.

    Weights come in one of two ways. ``accept:module``: :meth:`load` is given the trainer and samples from its module.
    ``accept:tensors``: :meth:`begin_load`, :meth:`take` bucket by bucket, :meth:`end_load`; between begin and end
    nothing is generated.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()
    """``accept:module`` (samples from a trainer's module in this process), ``accept:tensors``,
    ``accept:links`` (its processes receive tensors directly from the trainer's), ``logprobs``, ``seeds``, ``sleep``,
    ``pause``, ``top_p``, ..."""

    version: int = 0
    """Weight version of what is sampled now: the number of updates the policy had."""

    lighter: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Options that lower memory, the cheapest in speed first: what ``rlhf plan`` tries where a run does not fit."""

    @classmethod
    def parallel_sizes(cls, config: Any) -> tuple[int, int]:
        """(tensor parallel, pipeline parallel): one engine has as many workers as their product."""
        return 1, 1

    @classmethod
    def memory(
        cls, config: Any, dtype: str, size: ModelSize, work: SamplingWork, device: str, device_bytes: int | None
    ) -> EngineMemory:
        """The memory that one device of an engine would need, for ``rlhf plan``. Nothing is started.

        The default samples from the trainer's own module: there is no copy of the weights, and the cache, 2 bytes per
        element, grows to hold every sample at its longest.

        Args:
            dtype: ``auto`` | ``fp32`` | ``bf16``, the policy's.
            size: of the policy's model.
            work: what one engine samples.
            device: ``cpu`` | ``cuda``, where the engine would run.
            device_bytes: memory of one device, on a CPU of the host; None: unknown.
        """
        token = size.cache_bytes(2.0)
        cache = Held({"cache": int(work.samples * work.longest * token)})
        return EngineMemory({"rest": Held({}), "asleep": Held({}), "generate": cache}, copy=False, cache_token=token)

    refresh: Callable[[], object] | None = None
    """Set by the controller: brings the weights of now again, for an engine that was replaced."""

    @classmethod
    def check(cls, config: Any, spec: GeneratorSpec, samplings: Sequence[Sampling], device: str | None) -> None:
        """Refuse before anything starts what the constructor, or any request of the run, would be refused for, as far
        as it shows without the model. The default checks ``samplings``.

        Args:
            spec: its ``decode`` and end tokens are not known yet.
            samplings: how the run draws, in training and for evaluation.
            device: as for :meth:`rlhf.interfaces.Trainer.check`, of the engines.

        Raises CapabilityError, ConfigError, or PluginError where the engine is not installed.
        """
        from rlhf.requests import check_sampling

        for sampling in samplings:
            check_sampling(sampling)

    @abstractmethod
    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None: ...

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        """(position in ``requests``, sampled turn), as samples finish. An end token is part of the turn."""

    def load(self, source: Any, version: int) -> Proof:
        """Sample from the module of the trainer ``source`` from now on (``accept:module``)."""
        raise CapabilityError(f"generator {self.name!r} holds its own copy of the weights: it takes tensors")

    def begin_load(self, version: int) -> None:
        """Weights of ``version`` follow (``accept:tensors``)."""
        raise CapabilityError(f"generator {self.name!r} samples from a trainer's module: it takes no tensors")

    def take(self, bucket: Bucket) -> None:
        """Some of the tensors, by Hugging Face name; valid during the call only."""
        raise CapabilityError(f"generator {self.name!r} samples from a trainer's module: it takes no tensors")

    def end_load(self) -> list[Proof]:
        """All tensors have come: be ready to sample with them. One proof per process that holds weights; raises
        SyncError where a tensor that the model needs did not come."""
        raise CapabilityError(f"generator {self.name!r} samples from a trainer's module: it takes no tensors")

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Log-probs at temperature 1 of every token but the first, under the weights of now, by each engine: [engine]
        [sequence][token - 1]. The canary of a sync (``accept:tensors``)."""
        raise CapabilityError(f"generator {self.name!r} reports no log-probs of given tokens")

    def stale(self, bucket: Bucket) -> list[str]:
        """Which of these tensors, whose values the model should hold, it demonstrably does not: for the message after a
        canary failed. Names that cannot be checked are left out."""
        return []

    def sleep(self) -> None:
        """Give device memory back until :meth:`wake`."""

    def wake(self) -> bool | None:
        """Be ready to generate. True: its weights were given up while it slept, nobody set :attr:`refresh`, and they
        have to come again before anything is sampled."""
        return False

    def pause(self) -> None:
        """Samples under way wait, so that weights can be loaded between two of their tokens, and go on with these after
        :meth:`resume`; :attr:`Turn.versions` says from which token on (``pause``). Until then asking the iterator of
        :meth:`generate` for more raises, and loses nothing."""
        raise CapabilityError(f"generator {self.name!r} cannot pause: exhaust or close generate() instead")

    def resume(self) -> None:
        """After :meth:`pause`: samples are drawn again."""
        raise CapabilityError(f"generator {self.name!r} cannot pause: it has nothing to resume")

    def close(self) -> None:
        """Release what it holds."""
