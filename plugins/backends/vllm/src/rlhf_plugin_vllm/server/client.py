"""One vLLM server: its calls for weights, and its answers in the OpenAI protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlhf.errors import ModelError, SyncError
from rlhf_engines.requests import NewTokens
from rlhf_engines.server import CONNECT, EngineServer


class VllmServer(EngineServer):
    """See :class:`~rlhf_engines.server.EngineServer`. Its facts are those of
    :func:`rlhf_plugin_vllm.worker.served.ServedWeights.rlhf_facts`."""

    generator = "vllm_server"
    plugin = "rlhf-plugin-vllm"
    start = (
        "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls "
        "rlhf_plugin_vllm.worker.served.ServedWeights --logprobs-mode processed_logprobs"
    )
    keys = "Set generator.token_env to the environment variable with their --api-key"
    path = "/v1/completions"

    async def call(self, method: str, *arguments: str | None, timeout: float) -> list[Any]:
        body = {"method": method, "args": list(arguments), "timeout": timeout}
        response = await self.control("/collective_rpc", f"{method}()", timeout + CONNECT, body)
        answers = response.json()["results"]
        for answer in answers:
            if answer["error"]:
                raise SyncError(f"{self.url}, worker {answer['rank']}: {answer['error']}")
        return [answer["value"] for answer in answers]

    async def pause(self, timeout: float) -> None:
        """Pause sampling. Requests of other clients, such as a chat, end first. New ones wait for :meth:`resume`, or
        are refused by vLLM 0.33. An engine that samples while weights are loaded dies. Raises SyncError."""
        await self.control("/pause?mode=wait", "/pause?mode=wait", timeout)

    async def resume(self, timeout: float) -> None:
        await self.control("/resume", "/resume", timeout)

    async def logprobs(self, sequences: Sequence[Sequence[int]], salt: str) -> list[list[float]]:
        body = {
            "prompt": [list(ids) for ids in sequences],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        choices = (await self.attempted(lambda: self.ask(body)))["choices"]
        places = {choice["index"]: choice["prompt_logprobs"][1:] for choice in choices}
        return [
            [place[str(token)]["logprob"] for place, token in zip(places[n], ids[1:], strict=True)]
            for n, ids in enumerate(sequences)
        ]

    def new_tokens(self, answer: Any, count: int) -> Iterable[NewTokens]:
        for choice in answer["choices"]:
            ids = choice.get("token_ids") or []
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs", [])
            if len(ids) != len(logprobs):
                raise ModelError(f"a server returned {len(ids)} token_ids and {len(logprobs)} log-probs")
            yield NewTokens(ids, logprobs, choice["finish_reason"], choice.get("stop_reason"))
