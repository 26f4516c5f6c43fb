"""The run's requests to an inference engine: checks that the engine can sample them, and unfinished samples."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from rlhf.errors import ConfigError, ModelError
from rlhf.requests import check_request
from rlhf.types import Finish, GenerationRequest, Turn
from rlhf_modeling.stop_strings import StopScanner


def check_fits(
    i: int,
    request: GenerationRequest,
    vocabulary: int,
    longest: int,
    images: int,
    has_base: bool = False,
) -> None:
    """Refuse a request that does not fit into the engine. Raises ConfigError with request, value and range.

    Args:
        vocabulary: token ids must be below it.
        longest: maximum number of tokens, prompt and answer together.
        images: maximum number of images per request.
        has_base: see :func:`rlhf.requests.check_request`.
    """
    if len(request.images) > images:
        raise ConfigError(
            f"request {i} has {len(request.images)} images, but the engine was started for {images}. Raise "
            "data.max_images, or use fewer images."
        )
    check_request(i, request, vocabulary, has_base)
    need = len(request.ids) + request.sampling.max_new_tokens
    if need > longest:
        raise ConfigError(
            f"request {i} may need {need} tokens (prompt {len(request.ids)} + max_new_tokens "
            f"{request.sampling.max_new_tokens}), but the engine was started for {longest}. Raise data.max_tokens (at "
            "most to the model's positions), lower max_new_tokens or shorten the prompt."
        )


class NewTokens(NamedTuple):
    """Tokens that an engine has sampled for a request since its last answer."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-prob of each token, under the distribution that it was drawn from."""
    finish: str | None
    """How the engine ended the request; None: it is not finished."""
    reason: object = None
    """More about ``finish``, for messages."""


class OpenRequest:
    """One unfinished request.

    Args:
        engine: the engine's name, for messages.
        ends: tokens that end the sample and that were not passed to the engine.
    """

    def __init__(
        self,
        position: int,
        request: GenerationRequest,
        decode: Callable[[Sequence[int]], str],
        version: int,
        engine: str,
        ends: Collection[int] = (),
    ) -> None:
        self.position, self.request, self._decode, self.engine = position, request, decode, engine
        self._versions = [(0, version)]
        self._ids, self._logprobs = array("i"), array("f")
        stop = request.sampling.stop
        self._scanner = StopScanner(stop, decode) if stop else None
        self._ends = ends

    def continue_with(self, version: int, count: int) -> None:
        """Tokens after the first ``count`` are sampled with weights of ``version``."""
        # No token was sampled with the last version.
        if self._versions[-1][0] == count:
            self._versions.pop()
        if not self._versions or self._versions[-1][1] != version:  # the same weights may be sent again
            self._versions.append((count, version))

    @property
    def watches(self) -> bool:
        """Whether the sample may end here before the engine ends it."""
        return self._scanner is not None or bool(self._ends)

    @property
    def count(self) -> int:
        """Tokens sampled so far."""
        return len(self._ids)

    def add(self, tokens: NewTokens) -> tuple[Turn, bool] | None:
        """Returns None until the request has ended, then (turn, whether the engine must abort the request)."""
        old_count = self.count
        self._ids.extend(tokens.ids)
        self._logprobs.extend(tokens.logprobs)
        if self.watches:
            for count, token in enumerate(tokens.ids, old_count + 1):
                if token in self._ends or (self._scanner is not None and self._scanner.feed(token)):
                    return self._turn(count, "stop"), tokens.finish is None
        if tokens.finish is None:
            return None
        if tokens.finish not in ("stop", "length"):
            raise ModelError(f"{self.engine} ended request {self.position} with {tokens.finish!r} ({tokens.reason!r})")
        return self._turn(self.count, "stop" if tokens.finish == "stop" else "length"), False

    def _turn(self, count: int, finish: Finish) -> Turn:
        ids, logprobs = self._ids[:count], self._logprobs[:count]
        if len(logprobs) != count or not math.isfinite(sum(logprobs)):
            raise ModelError(
                f"{self.engine} reports log-probs {list(logprobs)} for {count} tokens of request {self.position}: the "
                "weights hold NaN, or the arithmetic overflowed. Look at the last update's gradient norm, or sample in "
                "fp32."
            )
        return Turn(
            ids=ids,
            sampled=True,
            logprobs=logprobs,
            # Without versions of tokens after the end. An empty answer keeps the first version.
            versions=tuple(v for v in self._versions if v[0] < max(count, 1)),
            finish=finish,
            temperature=self.request.sampling.temperature or 1.0,
            text=self._decode(ids),
        )
