"""The generator ``simulated``: engines that take time and draw random tokens."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, ClassVar

from pydantic import Field
from rlhf.errors import SyncError
from rlhf.interfaces import AnswersRequests, ComponentConfig, Generator, GeneratorSpec, Proof, TakesTensors
from rlhf.types import GenerationRequest, Image, Turn
from rlhf.weights.bucket import Bucket

from rlhf_plugin_simulated.delays import log_normal

SLICE = 0.05
"""Seconds between two checks for complete samples in :meth:`SimulatedGenerator.generate`."""
_TOKENS = bytes(3 + n % 29 for n in range(256))
"""Translates random bytes to token ids from 3 to 31."""


class SimulatedGeneratorConfig(ComponentConfig):
    engines: Annotated[int, Field(gt=0)] = 1
    """Engines that are simulated."""
    slots: Annotated[int, Field(gt=0)] = 64
    """Samples that an engine processes at once. Others wait."""
    tokens: Annotated[float, Field(gt=0)] = 200.0
    """Mean number of tokens of an answer, cut at ``sampling.max_new_tokens``."""
    tokens_sigma: Annotated[float, Field(ge=0)] = 0.5
    """Standard deviation of the logarithm of that number; 0: every answer has the mean."""
    tokens_per_second: Annotated[float, Field(gt=0)] = 50.0
    """Tokens per second of one sample, regardless of the load of its engine."""
    deaths: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the samples whose engine dies meanwhile. They are sampled again."""
    load_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds in which engines take new weights. No token is sampled meanwhile."""
    speed: Annotated[float, Field(gt=0)] = 1.0
    """Simulated seconds per second."""


class SimulatedGenerator(TakesTensors, AnswersRequests, Generator):
    """Tokens and lengths depend on the seed of the request alone; log-probs are -1."""

    name = "simulated"
    capabilities: ClassVar[frozenset[str]] = frozenset({"logprobs", "seeds"})
    Config = SimulatedGeneratorConfig

    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None:
        self.config: SimulatedGeneratorConfig = self.Config() if config is None else config  # type: ignore[assignment]
        self.spec = spec
        self._loading: tuple[int, dict[str, str]] | None = None
        self._deaths = random.Random(spec.seed)
        self._samples = UnfinishedSamples(self.config.engines * self.config.slots)
        """Tokens so far of the unfinished samples of :meth:`advance`."""

    # ------------------------------------------------------------------------------------- samples

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        count = len(requests)
        samples = self._new_samples(dict(enumerate(requests)))
        while count:
            complete = samples.advance(SLICE, self._dies)
            count -= len(complete)
            yield from ((position, self._turn(s.request, tuple(s.versions))) for position, s in complete)

    def advance(
        self, requests: Mapping[int, GenerationRequest], dropped: Sequence[int] = (), seconds: float = 0.0
    ) -> list[tuple[int, Turn]]:
        for name in dropped:
            self._samples.unfinished.pop(name, None)
        self._samples.unfinished |= self._new_samples(requests).unfinished
        one_token = 1 / self.config.tokens_per_second / self.config.speed
        complete = self._samples.advance(max(seconds, one_token), self._dies)
        return [(name, self._turn(s.request, tuple(s.versions))) for name, s in complete]

    def _new_samples(self, requests: Mapping[int, GenerationRequest]) -> UnfinishedSamples:
        samples = UnfinishedSamples(self.config.engines * self.config.slots)
        for name, request in requests.items():
            samples.unfinished[name] = SimulatedSample(request, self._seconds(request), [(0, self.version)])
        return samples

    def _dies(self) -> bool:
        return self._deaths.random() < self.config.deaths

    def unfinished_tokens(self) -> int:
        return self._samples.tokens_drawn(self._count)

    def _count(self, request: GenerationRequest) -> int:
        """Tokens of the answer."""
        tokens = log_normal(random.Random(request.seed), self.config.tokens, self.config.tokens_sigma)
        return max(1, min(round(tokens), request.sampling.max_new_tokens))

    def _seconds(self, request: GenerationRequest) -> float:
        return self._count(request) / self.config.tokens_per_second / self.config.speed

    def _turn(self, request: GenerationRequest, versions: tuple[tuple[int, int], ...]) -> Turn:
        count = self._count(request)
        ids = array("i", list(random.Random(request.seed).randbytes(count).translate(_TOKENS)))
        full = count == request.sampling.max_new_tokens
        if not full:
            ids[-1] = self.spec.eos_token_ids[0]
        # Rounding can place a change of weights after the last token.
        spans = {min(first, count - 1): version for first, version in versions}
        return Turn(
            ids,
            True,
            array("f", [-1.0]) * count,
            tuple(sorted(spans.items())),
            "length" if full else "stop",
            request.sampling.temperature or 1.0,
            text=str(count),
        )

    # ------------------------------------------------------------------------------------- weights

    def begin_load(self, version: int) -> None:
        self._loading = version, {}

    def take(self, bucket: Bucket) -> None:
        if self._loading is None:
            raise SyncError("take() without begin_load()")
        self._loading[1].update(bucket.received())

    def end_load(self) -> list[Proof]:
        if self._loading is None:
            raise SyncError("end_load() without begin_load()")
        self.version, received = self._loading
        self._loading = None
        self._samples.change_version(self.version, self.spec.in_flight == "restart", self._count)
        time.sleep(self.config.load_seconds / self.config.speed)
        return [Proof(self.version, received=received, dtype="fp32")]

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[list[float]]]:
        return [[[0.0] * (len(ids) - 1) for ids in sequences]]


@dataclass(slots=True)
class SimulatedSample:
    request: GenerationRequest
    seconds: float
    """Duration of the whole answer."""
    versions: list[tuple[int, int]]
    """(first token, version of the weights that drew it and its successors)."""
    seconds_left: float = field(init=False)
    """Seconds until the answer is complete."""

    def __post_init__(self) -> None:
        self.seconds_left = self.seconds


class UnfinishedSamples:
    """Unfinished samples of an engine that is called in time slices.

    Args:
        places: maximum number of samples in progress; the others wait, in order.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self.unfinished: dict[int, SimulatedSample] = {}

    def advance(self, seconds: float, is_restarted: Callable[[], bool]) -> list[tuple[int, SimulatedSample]]:
        """Advance by about ``seconds``. Returns the complete samples.

        Args:
            is_restarted: called for each of them; returns whether it is sampled again.
        """
        end, complete = time.monotonic() + seconds, list[tuple[int, SimulatedSample]]()
        while self.unfinished:
            running = dict(islice(self.unfinished.items(), self._places))
            step = min(min(sample.seconds_left for sample in running.values()), end - time.monotonic())
            time.sleep(max(0.0, step))
            for name, sample in running.items():
                sample.seconds_left -= max(0.0, step)
                if sample.seconds_left <= 0 and is_restarted():
                    sample.seconds_left, sample.versions = sample.seconds, [(0, sample.versions[-1][1])]
                elif sample.seconds_left <= 0:
                    complete.append((name, self.unfinished.pop(name)))
            if time.monotonic() >= end:
                break
        return complete

    def tokens_drawn(self, count: Callable[[GenerationRequest], int]) -> int:
        """Number of tokens so far of the unfinished samples. ``count``: as for :meth:`change_version`."""
        return sum(round(count(s.request) * (1 - s.seconds_left / s.seconds)) for s in self.unfinished.values())

    def change_version(self, version: int, restart: bool, count: Callable[[GenerationRequest], int]) -> None:
        """Make new weights draw the remaining tokens; with ``restart`` all tokens.

        Args:
            count: returns the number of tokens of the whole answer.
        """
        for sample in self.unfinished.values():
            if restart:
                sample.seconds_left, sample.versions = sample.seconds, [(0, version)]
            elif sample.versions[-1][1] != version:
                tokens = round(count(sample.request) * (1 - sample.seconds_left / sample.seconds))
                sample.versions.append((tokens, version))
