"""One SGLang server: its calls for weights, and its answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlhf.errors import ModelError, SyncError
from rlhf.types import Turn
from rlhf_engines.requests import NewTokens, OpenRequest
from rlhf_engines.server import EngineServer


class SglangServer(EngineServer):
    """See :class:`~rlhf_engines.server.EngineServer`. Its facts are those of
    :meth:`rlhf_plugin_sglang.worker.ServedModel.facts`.

    Args:
        admin: headers for calls about weights and pauses.
    """

    generator = "sglang_server"
    plugin = "rlhf-plugin-sglang"
    start = "python -m sglang.launch_server --model-path MODEL --enable-deterministic-inference"
    keys = (
        "Set generator.token_env to the environment variable with their --api-key, and generator.admin_token_env to "
        "that with their --admin-api-key"
    )
    health = "/model_info"  # /health asks for a token, which a paused server does not generate
    path = "/generate"

    def __init__(
        self, url: str, headers: Mapping[str, str], admin: Mapping[str, str], timeout: float, attempts: int
    ) -> None:
        super().__init__(url, headers, timeout, attempts)
        self._admin = admin

    async def call(self, method: str, *arguments: str | None, timeout: float) -> list[Any]:
        body = {"action": method, "skip_tensor_list": [json.dumps(arguments)]}
        response = await self.control("/weights_checker", f"{method}()", timeout, body, self._admin)
        answer = response.json()
        if not answer["success"]:
            raise SyncError(f"the server {self.url} refused {method}(): {answer['message']}")
        workers = json.loads(answer["message"])
        for rank, worker in enumerate(workers):
            if worker["error"]:
                raise SyncError(f"{self.url}, worker {rank}: {worker['error']}")
        return [worker["value"] for worker in workers]

    async def pause(self, timeout: float) -> None:
        """Pause sampling. Requests of other clients wait, and continue with the new weights at :meth:`resume`. Raises
        SyncError."""
        await self.control("/pause_generation", "/pause_generation", timeout, {"mode": "retract"}, self._admin)

    async def resume(self, timeout: float) -> None:
        await self.control("/continue_generation", "/continue_generation", timeout, {}, self._admin)

    async def logprobs(self, sequences: Sequence[Sequence[int]], salt: str) -> list[list[float]]:
        body = {
            "input_ids": [list(ids) for ids in sequences],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": salt,
        }
        answers = await self.attempted(lambda: self.ask(body))
        return [[logprob for logprob, _, _ in answer["meta_info"]["input_token_logprobs"][1:]] for answer in answers]

    async def sample(self, begin: Callable[[], OpenRequest], body: dict[str, Any]) -> Turn:
        turn = await super().sample(begin, body)
        limit = body["sampling_params"]["max_new_tokens"]
        if turn.finish == "length" and len(turn.ids) < limit:
            raise ModelError(
                f"the server {self.url} ended a sample after {len(turn.ids)} of at most {limit} tokens, because of "
                "its own limit. Check SGLANG_MAX_NEW_TOKENS_LIMIT and --max-total-tokens there."
            )
        return turn

    def new_tokens(self, answer: Any, count: int) -> Iterable[NewTokens]:
        """An answer has all tokens of the sample so far."""
        info = answer["meta_info"]
        ids = answer["output_ids"]
        logprobs = info.get("output_token_sampling_logprobs")  # after truncation; the other field is for all tokens
        if logprobs is None:
            logprobs = [logprob for logprob, _, _ in info["output_token_logprobs"]]
        if len(ids) != len(logprobs):
            raise ModelError(f"a server returned {len(ids)} output_ids and {len(logprobs)} log-probs")
        finish = info["finish_reason"]
        yield NewTokens(ids[count:], logprobs[count:], finish and finish["type"], finish)
