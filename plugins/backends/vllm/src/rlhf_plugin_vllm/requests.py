"""Converts requests of the run to vLLM's sampling parameters, and vLLM's outputs to turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlhf.errors import ModelError
from rlhf.ops.experts import record_of
from rlhf.types import ExpertLayers, ExpertRecord, GenerationRequest, Turn
from rlhf_engines.requests import NewTokens, OpenRequest

ENGINE = "vLLM"
TEMPERATURES = 0.01, 2.0
"""vLLM raises lower temperatures to the first one, and would report log-probs at it. It refuses higher ones than the
second."""


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
        # Only a stop string is searched for here after each token.
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
    without experts. Raises ModelError if it does not fit the tokens or the model.

    Args:
        tokens: number of tokens of the sequence, without the last one.
        position: position of the request.
    """
    shape: tuple[int, ...] = tuple(getattr(rows, "shape", ()))
    if len(shape) != 3 or shape[0] != tokens or shape[1] <= layers.layers[-1] or shape[2] != layers.chosen:
        raise ModelError(
            f"vLLM reports experts of shape {shape} for request {position}; expected [{tokens} tokens, more "
            f"than {layers.layers[-1]} layers, {layers.chosen} experts of a token]. Remove trainer.router_replay."
        )
    return record_of(rows[:, list(layers.layers)], layers)


class VllmRequest(OpenRequest):
    """One unfinished request of vLLM. ``experts``: the layers whose experts it records; None: it records none."""

    def __init__(
        self,
        position: int,
        request: GenerationRequest,
        decode: Callable[[Sequence[int]], str],
        version: int,
        experts: ExpertLayers | None = None,
    ) -> None:
        super().__init__(position, request, decode, version, ENGINE)
        self._experts = experts

    def take(self, output: Any) -> tuple[Turn, bool] | None:
        """:meth:`add` vLLM's ``RequestOutput``."""
        part = output.outputs[0]
        finish = str(part.finish_reason) if output.finished else None
        ending = self.add(NewTokens(part.token_ids, part.logprobs.logprobs, finish, part.stop_reason))
        if ending is None or self._experts is None or not output.finished:
            return ending
        turn, early = ending
        tokens = len(self.request.ids) + self.count - 1
        record = expert_record(part.routed_experts, tokens, self._experts, self.position)
        return replace(turn, experts=record if len(turn.ids) == self.count else None), early
