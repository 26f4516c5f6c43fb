"""Generators: sample tokens with log-probs and take new weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.errors import CapabilityError
from rlhf.interfaces.component import Ability, Component, ComponentConfig
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.interfaces.preflight import GeneratorPreflight
from rlhf.types import GenerationRequest, Image, Turn

if TYPE_CHECKING:
    from rlhf.weights.bucket import Bucket


@dataclass(frozen=True, slots=True)
class Proof:
    """A generator's evidence that it has loaded new weights."""

    version: int
    receiver: str = "the generator"
    """Which engine, and which of its workers, in messages."""
    nbytes: int = 0
    received: Mapping[str, str] = field(default_factory=dict)
    """{tensor name: fingerprint of the bytes as they arrived}, computed by the receiver."""
    dtype: str = ""
    """``fp32`` | ``bf16`` | ``fp8``: the arithmetic of sampling; empty: the trainer's own."""
    peak_memory: Mapping[str, int] = field(default_factory=dict)
    """:func:`rlhf.process_memory.peak_memory` of the process that holds the weights; empty: not known."""
    drafts: tuple[int, int] = (0, 0)
    """Speculative decoding: number of proposed tokens, and of those that were accepted, of samples that the engine has
    ended since its last load. One process of an engine tells them."""


class Generator(GeneratorPreflight, Component):
    """Samples tokens from the policy. A sample depends on (weights, ids, seed, sampling) only. Other requests in the
    batch change it by floating-point rounding at most.

    How it gets weights, and what only some generators can do, are classes of their own, from which the generator
    derives: :class:`TakesModule` or :class:`TakesTensors`, then :class:`AnswersRequests` and :class:`Sleeps`::

        class MyGenerator(TakesTensors, Sleeps, Generator): ...

    It is one engine. Several engines are behind one :class:`rlhf.interfaces.launcher.EnginePool`, which the launcher
    makes.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()
    """``logprobs``, ``seeds``, ``keep:keys`` (:attr:`GeneratorSpec.keys`), ``top_p``, ``images``
    (:attr:`rlhf.types.GenerationRequest.images`), ``base`` (:attr:`rlhf.types.GenerationRequest.base`: a
    :class:`TakesModule` where its trainer is a :class:`rlhf.interfaces.trainer.HasViews`, a :class:`TakesTensors` with
    :attr:`GeneratorSpec.adapters`), ``experts`` (:attr:`GeneratorSpec.experts`), ..."""

    version: int = 0
    """Version of the current weights: the number of updates that the policy had."""

    @abstractmethod
    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None: ...

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        """Yield (position in ``requests``, sampled turn) as samples finish. An end token is part of the turn."""

    def stream(self, request: GenerationRequest) -> Iterator[Sequence[int]]:
        """The tokens of the sample that :meth:`generate` draws for ``request``, in pieces, as early as they are known.
        The default yields all of them at once."""
        for _, turn in self.generate([request]):
            yield list(turn.ids)

    def close(self) -> None:
        """Release what it holds."""


class TakesModule(Ability):
    """Samples from the module of a trainer in the same process (:class:`rlhf.interfaces.trainer.SharesModule`)."""

    @abstractmethod
    def load(self, source: Any, version: int) -> Proof:
        """Sample from the module of the trainer ``source`` from now on."""


class TakesTensors(Ability):
    """Holds a copy of the weights of a trainer (:class:`rlhf.interfaces.trainer.SendsWeights`). They come by
    :meth:`begin_load`, :meth:`take` for each bucket, :meth:`end_load`; between begin and end nothing is generated."""

    has_base: bool = False
    """With ``GeneratorSpec.adapters``: every engine has the base, so that a load may bring the adapters alone. It is
    read after :meth:`begin_load`."""

    @abstractmethod
    def begin_load(self, version: int) -> None:
        """Weights of ``version`` follow."""

    @abstractmethod
    def take(self, bucket: Bucket) -> None:
        """Load some of the tensors, by Hugging Face name. The bucket is valid during the call only."""

    @abstractmethod
    def end_load(self) -> list[Proof]:
        """All tensors have been sent: get ready to sample with them. Returns one proof per process that holds weights.
        Raises SyncError if a tensor that the model needs is missing. With ``GeneratorSpec.adapters`` a load may bring
        the adapters alone, beside a base that is there already."""

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[list[float]]]:
        """Log-probs at temperature 1 of every token but the first, under the current weights, by each engine: [engine]
        [sequence][token - 1]. The controller compares them after a sync, as canaries. In a run with images one canary
        has an image.

        Args:
            images: of each sequence (capability ``images``); empty: no sequence has any.
        """
        raise CapabilityError(
            f"generator {type(self).__name__} reports no log-probs of given tokens, with which a sync of weights is "
            "proven. Set --sync.canaries 0."
        )

    def stale(self, bucket: Bucket) -> list[str]:
        """Names of the bucket's tensors whose values are not those that the model holds. Used in the message after a
        canary failed. Tensors that cannot be checked are left out."""
        return []


class AnswersRequests(Ability):
    """Samples single requests, while others are unfinished (``stream.mode = "continuous"``)."""

    @abstractmethod
    def advance(
        self, requests: Mapping[int, GenerationRequest], dropped: Sequence[int] = (), seconds: float = 0.0
    ) -> list[tuple[int, Turn]]:
        """Sample for about ``seconds``, at least one token, and return the turns that ended. Samples that are not
        finished stay until the next call. Weights may be loaded between two calls: what the load does to these
        samples is :attr:`GeneratorSpec.in_flight`, and :attr:`Turn.versions` says which weights drew which tokens.

        Args:
            requests: new ones, by a name that no unfinished sample has.
            dropped: names of samples that are not needed any more. Names of samples that ended are ignored.
        """

    def unfinished_tokens(self) -> int:
        """Tokens sampled so far of samples that have not ended; 0: it does not know. Called between two calls of
        :meth:`advance`."""
        return 0


class Sleeps(Ability):
    """Gives device memory back while the roles on the same devices compute."""

    @abstractmethod
    def sleep(self) -> None:
        """Release device memory until :meth:`wake`."""

    @abstractmethod
    def wake(self) -> bool | None:
        """Get ready to generate. Returns True if the weights were discarded while it slept: then the caller must send
        them before anything is sampled."""
