"""The generator ``sglang_server``: samples from SGLang servers that are already running, and sends them new weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from rlhf.errors import ConfigError
from rlhf.interfaces import GeneratorSpec
from rlhf.types import GenerationRequest, Sampling
from rlhf_engines.requests import OpenRequest
from rlhf_engines.server_config import EngineServersConfig
from rlhf_engines.server_generator import ServerGenerator, refusal

from rlhf_plugin_sglang.server import SglangServer

STREAM = 16
"""Number of tokens between two events of a stream. Each event has all tokens so far."""


class SglangServersConfig(EngineServersConfig):
    admin_token_env: str | None = None
    """Environment variable that holds the servers' key for weights and pauses (``--admin-api-key``)."""


class SglangServerGenerator(ServerGenerator):
    """SGLang's server at each of ``urls``: one engine, or several with the same weights.

    Requests and samples are tokens. Every sample has its own seed. Log-probs are under the sampled distribution, after
    temperature and truncation. Temperature 0 is greedy, with log-probs at temperature 1.

    Weights pass through files, bucket by bucket; each server fingerprints the data that it read. When the run ends, the
    servers keep its last weights. Before samples are passed on, their servers are asked whether they still hold the
    weights. A restarted server ends the run.
    """

    name = "sglang_server"
    source = "SGLang: Zheng et al., NeurIPS 2024 (arXiv:2312.07104)"
    capabilities: ClassVar[frozenset[str]] = frozenset({"logprobs", "seeds", "top_p", "top_k", "stop"})
    Config = SglangServersConfig
    engine = "SGLang"
    temperatures = (1e-6, math.inf)  # SGLang is greedy below it
    tokens = ("token_env", "admin_token_env")

    @classmethod
    def check_sampling(cls, config: Any, sampling: Sampling) -> None:
        super().check_sampling(config, sampling)
        if sampling.min_p:
            raise ConfigError(
                f"sampling.min_p is {sampling.min_p}; generator 'sglang_server' does not support it, because a "
                "seeded request with min_p ends SGLang's server. Set it to 0, or sample with `vllm_server`."
            )

    def _check(self, i: int, request: GenerationRequest) -> None:
        super()._check(i, request)
        check_support(i, request.sampling, self.vocabulary, min(server.facts["mask"] for server in self._servers))

    def _server(self, url: str) -> SglangServer:
        token = self._token("token_env")
        headers, admin = (
            {} if key is None else {"Authorization": f"Bearer {key}"}
            for key in (token, self._token("admin_token_env") or token)
        )
        return SglangServer(url, headers, admin, self.config.timeout, self.config.attempts)

    def _open(self, i: int, request: GenerationRequest) -> OpenRequest:
        ends = end_tokens(request.sampling, self.spec.eos_token_ids)
        unknown = () if self._end_at(ends) else ends
        return OpenRequest(i, request, self.spec.decode, self.version, self.engine, unknown)

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        ends = end_tokens(request.sampling, self.spec.eos_token_ids)
        return body(request, ends if self._end_at(ends) else (), self.vocabulary, self._load)

    def _end_at(self, ends: frozenset[int]) -> bool:
        """Whether servers can end a sample at ``ends``. SGLang also ends it at its model's end tokens, unless all end
        tokens are ignored."""
        return all(ends.issuperset(server.facts["eos_token_ids"]) for server in self._servers)

    def _unusable(self, facts: dict[str, Any]) -> str:
        return unusable(facts, self.spec, self.config.sync)


def check_support(i: int, sampling: Sampling, vocabulary: int, limit: int) -> None:
    """Raises ConfigError if servers with a limit of ``limit`` tokens cannot report the log-probs of request ``i``."""
    if _is_cut(sampling, vocabulary) and _top_k(sampling, vocabulary) > limit:
        raise ConfigError(
            f"request {i} has top_p = {sampling.top_p:g} and top_k = {sampling.top_k}; the servers report log-probs "
            f"after truncation to at most {limit} tokens. Set sampling.top_k to at most {limit}, or start them with "
            f"--sampling-mask-max-tokens {vocabulary}."
        )


def end_tokens(sampling: Sampling, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """Tokens that end a sample."""
    return frozenset((*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids))


def body(request: GenerationRequest, ends: Collection[int], vocabulary: int, salt: str) -> dict[str, Any]:
    """The request for SGLang's ``/generate``. It sets everything that a model's ``generation_config.json`` could
    change.

    Args:
        ends: tokens at which the server ends the sample; empty: no tokens.
    """
    s = request.sampling
    greedy = s.temperature == 0
    return {
        "input_ids": list(request.ids),
        "sampling_params": {
            "temperature": s.temperature,
            "top_p": 1.0 if greedy else s.top_p,
            # always finite: for the same seed SGLang draws different tokens if no request of the batch has a finite one
            "top_k": vocabulary if greedy else _top_k(s, vocabulary),
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "sampling_seed": request.seed - 2**64 if request.seed >= 2**63 else request.seed,
            "max_new_tokens": s.max_new_tokens,
            "min_new_tokens": 0,
            "ignore_eos": not ends,
            "stop_token_ids": sorted(ends),
            "stream_interval": STREAM,
        },
        "return_logprob": True,
        "return_sampling_mask": _is_cut(s, vocabulary),
        "extra_key": salt,
    }


def _is_cut(sampling: Sampling, vocabulary: int) -> bool:
    """Whether tokens are excluded."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or _top_k(sampling, vocabulary) < vocabulary)


def _top_k(sampling: Sampling, vocabulary: int) -> int:
    return min(sampling.top_k, vocabulary) if sampling.top_k else vocabulary


def unusable(facts: dict[str, Any], spec: GeneratorSpec, sync: str) -> str:
    """Why a server cannot be used; empty if it can."""
    rules = (
        (
            facts["deterministic"],
            "draws samples that do not depend on their seeds alone. Start it with --enable-deterministic-inference",
        ),
        (
            not facts["incremental"],
            "sends only the new part of an answer instead of the whole answer so far. Start it without "
            "--incremental-streaming-output",
        ),
        (
            facts["pipeline_parallel"] == 1,
            f"has {facts['pipeline_parallel']} stages, but only one of them would prove its weights. Start it with "
            "--pp-size 1",
        ),
        (not facts["shared"], "shares its weights with other servers. Start it with --weight-cache-mode off"),
    )
    reason = refusal(facts, spec, sync, f"--context-length {spec.max_tokens + 2} (and the same --max-total-tokens)")
    return reason or next((fault for holds, fault in rules if not holds), "")
