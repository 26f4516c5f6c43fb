"""Converts requests of the run to vLLM's sampling parameters, and vLLM's outputs to turns."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from rlhf.errors import ConfigError, ModelError
from rlhf.ops.experts import record_of
from rlhf.requests import check_request, check_sampling
from rlhf.types import ExpertLayers, ExpertRecord, Finish, GenerationRequest, Turn
from rlhf_modeling.stop_strings import StopScanner

LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this temperature when a lower one is asked for, and would report log-probs of it."""


def check(i: int, request: GenerationRequest, vocabulary: int, longest: int, images: int) -> None:
    """Refuse a request that vLLM cannot sample as asked. Raises ConfigError naming request, value and range.

    Args:
        vocabulary: token ids are below it.
        longest: tokens, prompt and answer together.
        images: most of a request.
    """
    check_sampling(request.sampling, LOWEST_TEMPERATURE)
    if len(request.images) > images:
        raise ConfigError(
            f"request {i} has {len(request.images)} images, and the engine was started for {images}. Raise "
            "data.max_images, or show fewer images."
        )
    check_request(i, request, vocabulary)
    need = len(request.ids) + request.sampling.max_new_tokens
    if need > longest:
        raise ConfigError(
            f"request {i} may need {need} tokens (prompt {len(request.ids)} + max_new_tokens "
            f"{request.sampling.max_new_tokens}), and the engine was started for {longest}. Raise data.max_tokens (at "
            "most to the model's positions), lower max_new_tokens or shorten the prompt."
        )


def sampling_parameters(request: GenerationRequest, eos_token_ids: Sequence[int]) -> Any:
    """vLLM's ``SamplingParams``. The run's end tokens are passed as stop tokens, so that vLLM uses no others."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    s = request.sampling
    return SamplingParams(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        seed=request.seed,
        max_tokens=s.max_new_tokens,
        stop_token_ids=[*(() if s.ignore_eos else eos_token_ids), *s.stop_token_ids],
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA if s.stop else RequestOutputKind.FINAL_ONLY,
    )


def scoring_parameters() -> Any:
    """Parameters for log-probs of the prompt's tokens, at temperature 1."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def expert_record(rows: Any, tokens: int, layers: ExpertLayers, position: int) -> ExpertRecord:
    """The record of ``CompletionOutput.routed_experts``, [tokens, layers, experts of a token] with zeros for each layer
    without experts. Raises ModelError where it is of other tokens or another model.

    Args:
        tokens: of the sequence, without the last one.
        position: of the request.
    """
    shape: tuple[int, ...] = tuple(getattr(rows, "shape", ()))
    if len(shape) != 3 or shape[0] != tokens or shape[1] <= layers.layers[-1] or shape[2] != layers.chosen:
        raise ModelError(
            f"vLLM reports experts of shape {shape} for request {position}; expected [{tokens} tokens, more "
            f"than {layers.layers[-1]} layers, {layers.chosen} experts of a token]. Remove trainer.router_replay."
        )
    return record_of(rows[:, list(layers.layers)], layers)


class OpenRequest:
    """One unfinished request."""

    def __init__(
        self,
        position: int,
        request: GenerationRequest,
        decode: Callable[[Sequence[int]], str],
        version: int,
        experts: ExpertLayers | None = None,
    ) -> None:
        self.position, self.request, self._decode = position, request, decode
        self._versions = [(0, version)]
        self._ids, self._logprobs = array("i"), array("f")
        self._experts = experts
        self._record: ExpertRecord | None = None
        stop = request.sampling.stop
        self._scanner = StopScanner(stop, decode) if stop else None

    def continue_with(self, version: int, count: int) -> None:
        """Tokens after the first ``count`` are sampled with weights of ``version``."""
        if self._versions[-1][0] == count:
            self._versions.pop()
        if not self._versions or self._versions[-1][1] != version:  # the same weights may be sent again
            self._versions.append((count, version))

    def take(self, output: Any) -> tuple[Turn, bool] | None:
        """Add vLLM's output of the request. Returns None until the request has ended, then (turn, whether vLLM must
        abort the request)."""
        part = output.outputs[0]
        before = len(self._ids)
        self._ids.extend(part.token_ids)
        self._logprobs.extend(part.logprobs.logprobs)
        if self._experts is not None and output.finished:
            tokens = len(self.request.ids) + len(self._ids) - 1
            self._record = expert_record(part.routed_experts, tokens, self._experts, self.position)
        if self._scanner is not None:
            for count, token in enumerate(part.token_ids, before + 1):
                if self._scanner.feed(token):
                    return self._turn(count, "stop"), not output.finished
        if not output.finished:
            return None
        if part.finish_reason not in ("stop", "length"):
            raise ModelError(f"vLLM ended request {self.position} with {part.finish_reason!r} ({part.stop_reason!r})")
        return self._turn(len(self._ids), part.finish_reason), False

    def _turn(self, count: int, finish: Finish) -> Turn:
        ids, logprobs = self._ids[:count], self._logprobs[:count]
        if len(logprobs) != count or not math.isfinite(sum(logprobs)):
            raise ModelError(
                f"vLLM reports log-probs {list(logprobs)} for {count} tokens of request {self.position}: the weights "
                "hold NaN, or the arithmetic overflowed. Look at the last update's gradient norm, or sample in fp32."
            )
        return Turn(
            ids=ids,
            sampled=True,
            logprobs=logprobs,
            versions=tuple(v for v in self._versions if v[0] < max(count, 1)),
            finish=finish,
            temperature=self.request.sampling.temperature or 1.0,
            text=self._decode(ids),
            experts=self._record if count == len(self._ids) else None,
        )
