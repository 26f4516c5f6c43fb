"""One vLLM server: what it is, its weights, and its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
from rlhf.errors import CapabilityError, ModelError, SyncError
from rlhf.types import Turn

from rlhf_plugin_vllm.requests import OpenRequest

T = TypeVar("T")
COMPLETIONS, EVENT = "/v1/completions", "data: {"

START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls "
    "rlhf_plugin_vllm.worker.served.ServedWeights --logprobs-mode processed_logprobs"
)
CONNECT = 10.0
"""Seconds for a connection."""
IDLE = 2.0
"""Seconds that an unused connection is kept, less than the 5 of vLLM's server: at its end a request could be lost."""


class VllmServer:
    """Talks to one server; all methods run in one event loop.

    Args:
        token: its API key, or None.
        timeout: seconds for the answer to one request.
        attempts: how often a request is asked over connections that fail.
    """

    def __init__(self, url: str, token: str | None, timeout: float, attempts: int) -> None:
        self.url, self.timeout, self.attempts = url, timeout, attempts
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE)
        patience = httpx.Timeout(timeout, connect=CONNECT)
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, timeout=patience, trust_env=False
        )
        self.facts: dict[str, Any] = {}
        """Of its first worker (:func:`rlhf_plugin_vllm.worker.served.ServedWeights.rlhf_facts`)."""

    async def close(self) -> None:
        await self._client.aclose()

    # ------------------------------------------------------------------------------------- weights

    async def call(self, method: str, *arguments: str | None, timeout: float) -> list[Any]:
        """The answer of each worker. Raises SyncError."""
        body = {"method": method, "args": list(arguments), "timeout": timeout}
        try:
            response = await self._client.post("/collective_rpc", json=body, timeout=timeout + CONNECT)
        except httpx.HTTPError as error:
            raise SyncError(f"the server {self.url} did not answer {method}(): {_words(error)}") from error
        if response.status_code != 200:
            raise SyncError(f"the server {self.url} refused {method}(): {_start(response)}")
        answers = response.json()["results"]
        for answer in answers:
            if answer["error"]:
                raise SyncError(f"{self.url}, worker {answer['rank']}: {answer['error']}")
        return [answer["value"] for answer in answers]

    async def pause(self, timeout: float) -> None:
        """Requests of others, such as a chat, end first; new ones wait for :meth:`resume`, or are refused by vLLM 0.33.
        An engine that samples while weights are loaded dies. Raises SyncError."""
        await self._control("/pause?mode=wait", timeout)

    async def resume(self, timeout: float) -> None:
        await self._control("/resume", timeout)

    async def _control(self, path: str, timeout: float) -> None:
        try:
            response = await self._client.post(path, timeout=timeout)
        except httpx.HTTPError as error:
            raise SyncError(f"the server {self.url} did not answer {path}: {_words(error)}") from error
        if response.status_code != 200:
            raise SyncError(f"the server {self.url} refused {path}: {_start(response)}")

    async def meet(self, path: str, text: str) -> None:
        """Ask for :attr:`facts`. ``text`` is the content of the file at ``path``, which each worker must see.

        Raises CapabilityError: it is no server that this generator can use.
        """
        try:
            health = await self._client.get("/health", timeout=self.timeout)
        except httpx.HTTPError as error:
            raise CapabilityError(
                f"generator 'vllm_server': {self.url} does not answer: {_words(error)}. Start it: {START}"
            ) from error
        if health.status_code != 200:
            raise CapabilityError(f"generator 'vllm_server': {self.url}/health answers {_start(health)}")
        try:
            workers = await self.call("rlhf_facts", path, timeout=self.timeout)
        except (SyncError, LookupError, ValueError, TypeError) as error:
            raise CapabilityError(
                f"generator 'vllm_server': {self.url} cannot take weights: {error}. It must be started with the "
                f"plugin rlhf-plugin-vllm installed beside it, and must see {path!r}: {START}"
            ) from error
        self.facts = workers[0]
        for worker in workers:
            if worker["text"] != text:
                raise CapabilityError(
                    f"generator 'vllm_server': {self.url} sees another file at {path!r}. Name a `folder` that this "
                    "process and the servers share."
                )

    # ------------------------------------------------------------------------------------ sampling

    async def sample(self, begin: Callable[[], OpenRequest], body: dict[str, Any]) -> Turn:
        """The turn of a request; ``begin`` makes it anew for each attempt. Raises ModelError."""
        return await self._attempted(lambda: self._draw(begin(), body))

    async def logprobs(self, sequences: Sequence[Sequence[int]], salt: str) -> list[list[float]]:
        """At temperature 1, of every token but the first of each sequence. Raises ModelError."""
        body = {
            "prompt": [list(ids) for ids in sequences],
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "ignore_eos": True,
            "cache_salt": salt,
        }
        choices = await self._attempted(lambda: self._choices(body))
        places = {choice["index"]: choice["prompt_logprobs"][1:] for choice in choices}
        return [
            [place[str(token)]["logprob"] for place, token in zip(places[n], ids[1:], strict=True)]
            for n, ids in enumerate(sequences)
        ]

    async def _draw(self, sample: OpenRequest, body: dict[str, Any]) -> Turn:
        if sample.request.sampling.stop:
            async with aclosing(self._stream(body)) as stream:  # closed early, the server drops the request
                async for choice in stream:
                    if (ended := sample.take(_output(choice))) is not None:
                        return ended[0]
        else:
            [choice] = await self._choices(body)
            if (ended := sample.take(_output(choice))) is not None:
                return ended[0]
        raise ModelError(f"the server {self.url} gave an answer without an end")

    async def _choices(self, body: dict[str, Any]) -> list[Any]:
        response = await self._client.post(COMPLETIONS, json=body)
        if response.status_code != 200:
            raise self._refusal(response)
        choices: list[Any] = response.json()["choices"]
        return choices

    async def _stream(self, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        async with self._client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
                raise self._refusal(response)
            async for line in response.aiter_lines():
                if line.startswith(EVENT):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ModelError(f"the server {self.url} failed: {event['error']}")
                    for choice in event["choices"]:
                        yield choice

    async def _attempted(self, ask: Callable[[], Awaitable[T]]) -> T:
        for attempt in count(1):
            try:
                return await ask()
            except httpx.TransportError as error:
                if attempt >= self.attempts or isinstance(error, httpx.ReadTimeout):
                    raise ModelError(f"the server {self.url} did not answer: {_words(error)}") from error
            await asyncio.sleep(attempt)
        raise AssertionError

    def _refusal(self, response: httpx.Response) -> ModelError:
        return ModelError(f"the server {self.url} refused a request: {_start(response)}")


def _output(choice: dict[str, Any]) -> Any:
    """A choice of the OpenAI protocol in the form of vLLM's ``RequestOutput``."""
    ids = choice.get("token_ids") or []
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs", [])
    if len(ids) != len(logprobs):
        raise ModelError(f"a server answered {len(ids)} token_ids and {len(logprobs)} log-probs")
    finish = choice["finish_reason"]
    part = SimpleNamespace(
        token_ids=ids,
        logprobs=SimpleNamespace(logprobs=logprobs),
        finish_reason=finish,
        stop_reason=choice.get("stop_reason"),
    )
    return SimpleNamespace(outputs=[part], finished=finish is not None)


def _start(response: httpx.Response) -> str:
    return f"HTTP status {response.status_code}, {response.text[:300]!r}"


def _words(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__} {error}".strip()
