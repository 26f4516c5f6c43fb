"""Generators: sample tokens with log-probs and take new weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlhf.errors import CapabilityError
from rlhf.interfaces.component import Component, ComponentConfig
from rlhf.interfaces.memory import EngineMemory, Held, ModelSize, SamplingWork
from rlhf.types import GenerationRequest, Image, Sampling, Turn

if TYPE_CHECKING:
    from rlhf.weights.bucket import Bucket


@dataclass(frozen=True, slots=True)
class GeneratorSpec:
    """The policy's model and limits, resolved from the run file's ``[policy]`` and ``[data]``. The spec, including
    ``decode``, is pickled if engines run in other processes."""

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
    """Seconds that taking one bucket of weights may last."""
    in_flight: Literal["continue", "drain", "restart"] = "continue"
    """What a load of weights does to requests of :meth:`Generator.answer` that are not finished. ``continue``: their
    next tokens are sampled with the new weights. ``drain``: the load waits until they are finished. ``restart``: they
    are sampled again from their first token."""
    keys: Literal["recompute", "keep"] = "recompute"
    """``in_flight = "continue"``: whether keys and values of the tokens so far are computed again with the new weights.
    ``keep`` (capability ``keep:keys``): they stay those of the weights that computed them. No other request reads
    them."""
    max_images: int = 0
    """Most images of a request (capability ``images``)."""
    shares_devices: bool = False
    """Roles of the run are on the engine's devices. They are loaded before the engine starts, and the engine may
    be told to sleep while they compute (capability ``sleep``)."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A generator's evidence that it has loaded new weights."""

    version: int
    who: str = "the generator"
    """Which engine, and which of its workers, in messages."""
    nbytes: int = 0
    received: Mapping[str, str] = field(default_factory=dict)
    """{tensor name: fingerprint of the bytes as they arrived}, computed by the receiver (``accept:tensors``)."""
    dtype: str = ""
    """``fp32`` | ``bf16``: the arithmetic of sampling; empty: the trainer's own."""


class Generator(Component):
    """Samples tokens from the policy. A sample depends on (weights, ids, seed, sampling) only. Other requests in the
    batch change it by floating-point rounding at most.

    A generator gets weights in one of two ways. ``accept:module``: :meth:`load` gets the trainer, and the generator
    samples from its module. ``accept:tensors``: :meth:`begin_load`, :meth:`take` for each bucket, :meth:`end_load`;
    between begin and end nothing is generated.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()
    """``accept:module`` (samples from a trainer's module in this process), ``accept:tensors``,
    ``accept:links`` (its processes receive tensors directly from the trainer's), ``logprobs``, ``seeds``, ``sleep``,
    ``answers`` (single requests: :meth:`advance`), ``keep:keys`` (:attr:`GeneratorSpec.keys`), ``top_p``, ``images``
    (:attr:`rlhf.types.GenerationRequest.images`), ..."""

    version: int = 0
    """Version of the current weights: the number of updates that the policy had."""

    lighter: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    """Options that lower memory, the cheapest in speed first. ``rlhf plan`` tries them if a run does not fit."""

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

    @classmethod
    def check(cls, config: Any, spec: GeneratorSpec, samplings: Sequence[Sampling], device: str | None) -> None:
        """Before anything starts, refuse options that the constructor or a request of the run would refuse, as far as
        this is known without the model. The default checks ``samplings``.

        Args:
            spec: its ``decode`` and end tokens are not known yet.
            samplings: the run's sampling parameters, of training and of evaluation.
            device: as for :meth:`rlhf.interfaces.Trainer.check`, of the engines.

        Raises CapabilityError, ConfigError, or PluginError if the engine is not installed.
        """
        from rlhf.requests import check_sampling

        for sampling in samplings:
            check_sampling(sampling)

    @abstractmethod
    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None: ...

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        """Yield (position in ``requests``, sampled turn) as samples finish. An end token is part of the turn."""

    def advance(
        self, requests: Mapping[int, GenerationRequest], dropped: Sequence[int] = (), seconds: float = 0.0
    ) -> list[tuple[int, Turn]]:
        """Sample for about ``seconds``, at least one token, and return the turns that ended (``answers``). Samples that
        are not finished stay until the next call. Weights may be loaded between two calls: what the load does to these
        samples is :attr:`GeneratorSpec.in_flight`, and :attr:`Turn.versions` says which weights drew which tokens.

        Args:
            requests: new ones, by a name that no unfinished sample has.
            dropped: names of samples that are not needed any more. Names of samples that ended are ignored.
        """
        raise CapabilityError(f"generator {self.name!r} answers no single requests: call generate()")

    async def answer(self, request: GenerationRequest) -> Turn:
        """One sampled turn, while other requests and the training of the policy go on. A launcher with the capability
        ``answers`` makes this of :meth:`advance`. It is awaited on an event loop that is not the main thread's; the
        other methods are called on the main thread. Cancelling the call drops the sample."""
        raise CapabilityError(f"generator {self.name!r} answers no single requests: call generate()")

    def pause(self) -> None:
        """Sample nothing for requests of :meth:`answer` until :meth:`resume`. Weights are loaded and proven meanwhile.
        With ``in_flight = "drain"`` it first waits until the unfinished requests are answered. Calls may be nested."""
        return

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        return

    def repair(self) -> None:
        """Replace engines that died since the last call, so that requests of :meth:`answer` go on. Called on the main
        thread, again and again while it waits for samples."""
        return

    def idle(self) -> tuple[float, float] | None:
        """(engine seconds without a request, engine seconds) since the last call; None: it does not know. Called on
        the main thread."""
        return None

    def unfinished_tokens(self) -> int:
        """Tokens sampled so far of samples of :meth:`advance` or :meth:`answer` that have not ended; 0: it does not
        know. Called between two calls of :meth:`advance`, and of a launcher's generator on any thread."""
        return 0

    def restarted(self) -> Mapping[str, int]:
        """{why: tokens} of requests of :meth:`answer` that were sampled and thrown away since the last call, because
        their samples began again: ``weights`` (``in_flight = "restart"``), ``engine`` (it died). Called on the main
        thread."""
        return {}

    def load(self, source: Any, version: int) -> Proof:
        """Sample from the module of the trainer ``source`` from now on (``accept:module``)."""
        raise CapabilityError(f"generator {self.name!r} holds its own copy of the weights: it takes tensors")

    def begin_load(self, version: int) -> None:
        """Weights of ``version`` follow (``accept:tensors``)."""
        raise CapabilityError(f"generator {self.name!r} samples from a trainer's module: it takes no tensors")

    def take(self, bucket: Bucket) -> None:
        """Load some of the tensors, by Hugging Face name. The bucket is valid during the call only."""
        raise CapabilityError(f"generator {self.name!r} samples from a trainer's module: it takes no tensors")

    def end_load(self) -> list[Proof]:
        """All tensors have been sent: get ready to sample with them. Returns one proof per process that holds weights.
        Raises SyncError if a tensor that the model needs is missing."""
        raise CapabilityError(f"generator {self.name!r} samples from a trainer's module: it takes no tensors")

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[list[float]]]:
        """Log-probs at temperature 1 of every token but the first, under the current weights, by each engine: [engine]
        [sequence][token - 1]. The controller compares them after a sync, as canaries (``accept:tensors``). In a run
        with images one canary has an image.

        Args:
            images: of each sequence (capability ``images``); empty: no sequence has any.
        """
        raise CapabilityError(f"generator {self.name!r} reports no log-probs of given tokens")

    def stale(self, bucket: Bucket) -> list[str]:
        """Names of the bucket's tensors whose values are not those that the model holds. Used in the message after a
        canary failed. Tensors that cannot be checked are left out."""
        return []

    def sleep(self) -> None:
        """Release device memory until :meth:`wake`."""

    def wake(self) -> bool | None:
        """Get ready to generate. Returns True if the weights were discarded while it slept: then the caller must send
        them before anything is sampled."""
        return False

    def close(self) -> None:
        """Release what it holds."""
