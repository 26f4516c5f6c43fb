"""The generator ``vllm_server``: samples from vLLM servers that are already running, and sends them new weights."""

from __future__ import annotations

from typing import Any, ClassVar

from rlhf.interfaces import GeneratorSpec
from rlhf.types import GenerationRequest
from rlhf_engines.server_generator import ServerGenerator, refusal

from rlhf_plugin_vllm.requests import ENGINE, TEMPERATURES
from rlhf_plugin_vllm.server.client import VllmServer


class VllmServerGenerator(ServerGenerator):
    """vLLM's OpenAI server at each of ``urls``: one engine, or several with the same weights.

    Requests and samples are tokens. Seeds and log-probs are the same as for ``vllm``. Weights pass through files,
    bucket by bucket; each worker of each server fingerprints the data that it read. When the run ends, the servers keep
    its last weights. Before samples are passed on, their servers are asked whether they still hold the weights. A
    restarted server ends the run.
    """

    name = "vllm_server"
    source = "vLLM: Kwon et al., SOSP 2023 (arXiv:2309.06180)"
    capabilities: ClassVar[frozenset[str]] = frozenset({"logprobs", "seeds", "top_p", "top_k", "min_p", "stop"})
    engine = ENGINE
    temperatures = TEMPERATURES

    def _server(self, url: str) -> VllmServer:
        token = self._token("token_env")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return VllmServer(url, headers, self.config.timeout, self.config.attempts)

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        """The request in vLLM's form of the OpenAI protocol. It sets everything that a model's
        ``generation_config.json`` could change."""
        s = request.sampling
        return {
            "prompt": list(request.ids),
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "min_p": s.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # The field of the protocol is a signed number of 64 bits.
            "seed": request.seed - 2**64 if request.seed >= 2**63 else request.seed,
            "max_tokens": s.max_new_tokens,
            "min_tokens": 0,
            "stop_token_ids": [*(() if s.ignore_eos else self.spec.eos_token_ids), *s.stop_token_ids],
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "cache_salt": self._load,  # no key of older weights is read; vLLM 0.32 drops them in a pause, too
        }

    def _unusable(self, facts: dict[str, Any]) -> str:
        return unusable(facts, self.spec, self.config.sync)


def unusable(facts: dict[str, Any], spec: GeneratorSpec, sync: str) -> str:
    """Why a server cannot be used; empty if it can."""
    rules = (
        (
            facts["logprobs_mode"] == "processed_logprobs",
            "reports log-probs before temperature and truncation. Start it with --logprobs-mode processed_logprobs",
        ),
        (
            facts["device"] != "cpu" or not facts["chunked_prefill"],
            "splits prompts, but on a CPU vLLM ends when a seeded prompt is split. Start it with "
            "--no-enable-chunked-prefill",
        ),
    )
    reason = refusal(facts, spec, sync, f"--max-model-len {spec.max_tokens + 1}")
    return reason or next((fault for holds, fault in rules if not holds), "")
