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
    """Name of the engine and of its worker, for messages."""
    nbytes: int = 0
    received: Mapping[str, str] = field(default_factory=dict)
    """{tensor name: fingerprint of the received bytes}, computed by the receiver."""
    dtype: str = ""
    """``fp32`` | ``bf16`` | ``fp8``: the arithmetic of sampling; empty: the trainer's own."""
    peak_memory: Mapping[str, int] = field(default_factory=dict)
    """Result of :func:`rlhf.process_memory.peak_memory` in the process that holds the weights; empty: not known."""
    drafts: tuple[int, int] = (0, 0)
    """Speculative decoding: (proposed tokens, accepted tokens) of the samples that the engine has finished since its
    last load. One process of each engine reports them."""


class Generator(GeneratorPreflight, Component):
    """Samples tokens from the policy. A sample depends on (weights, ids, seed, sampling) only. Other requests in the
    batch change it by floating-point rounding at most.

    A generator also derives from :class:`TakesModule` or :class:`TakesTensors`, which say how it gets weights. Optional
    features are base classes too, :class:`AnswersRequests` and :class:`Sleeps`::

        class MyGenerator(TakesTensors, Sleeps, Generator): ...

    A generator is one engine. The launcher combines several engines in a :class:`rlhf.interfaces.launcher.EnginePool`.
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
        """Release all resources."""


class TakesModule(Ability):
    """Samples from the module of a trainer in the same process (:class:`rlhf.interfaces.trainer.SharesModule`)."""

    @abstractmethod
    def load(self, source: Any, version: int) -> Proof:
        """Sample from the module of the trainer ``source`` from now on."""


class TakesTensors(Ability):
    """Holds a copy of the weights of a trainer (:class:`rlhf.interfaces.trainer.SendsWeights`). A load is a call of
    :meth:`begin_load`, of :meth:`take` for each bucket, and of :meth:`end_load`. Nothing is generated during a load."""

    has_base: bool = False
    """With ``GeneratorSpec.adapters``: every engine has the base model, so a load may contain the adapters only. It is
    read after :meth:`begin_load`."""

    @abstractmethod
    def begin_load(self, version: int) -> None:
        """Start to load the weights of ``version``."""

    @abstractmethod
    def take(self, bucket: Bucket) -> None:
        """Load the tensors of one bucket, which have Hugging Face names. The bucket is valid during the call only."""

    @abstractmethod
    def end_load(self) -> list[Proof]:
        """Finish the load and get ready to sample. Returns one proof per process that holds weights. Raises SyncError
        if a tensor that the model needs is missing. With ``GeneratorSpec.adapters`` a load may contain the adapters
        only, if the engine already has the base model."""

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[list[float]]]:
        """Log-probs at temperature 1 under the current weights, of every token except the first:
        ``[engine][sequence][token - 1]``. The controller calls this with the canaries after each sync. In a run with
        images, one canary has an image.

        Args:
            images: the images of each sequence (capability ``images``); empty: no sequence has images.
        """
        raise CapabilityError(
            f"generator {type(self).__name__} does not report log-probs of given tokens, which are needed to prove a "
            "weight sync. Set --sync.canaries 0."
        )

    def stale(self, bucket: Bucket) -> list[str]:
        """Names of the bucket's tensors whose values differ from the model's. The error message of a failed canary
        lists them. Tensors that cannot be checked are left out."""
        return []


class AnswersRequests(Ability):
    """Samples single requests, while others are unfinished (``stream.mode = "continuous"``)."""

    @abstractmethod
    def advance(
        self, requests: Mapping[int, GenerationRequest], dropped: Sequence[int] = (), seconds: float = 0.0
    ) -> list[tuple[int, Turn]]:
        """Sample for about ``seconds``, at least one token, and return the finished turns. Unfinished samples continue
        in the next call. Weights may be loaded between two calls. :attr:`GeneratorSpec.in_flight` says what happens to
        unfinished samples then, and :attr:`Turn.versions` which weights sampled which tokens.

        Args:
            requests: new requests. The keys differ from those of all unfinished samples.
            dropped: keys of samples that are no longer needed. Keys of finished samples are ignored.
        """

    def unfinished_tokens(self) -> int:
        """Number of tokens that unfinished samples have so far; 0: not known. Called between two calls of
        :meth:`advance`."""
        return 0


class Sleeps(Ability):
    """Gives device memory back while the roles on the same devices compute."""

    @abstractmethod
    def sleep(self) -> None:
        """Release device memory until :meth:`wake`."""

    @abstractmethod
    def wake(self) -> bool | None:
        """Get ready to generate. Returns True if the weights were discarded during the sleep. The caller must then send
        them before anything is sampled."""
