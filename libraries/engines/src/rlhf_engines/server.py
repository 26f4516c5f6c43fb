"""One server of an inference engine: its facts, its weights, and its answers."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx
from rlhf.errors import CapabilityError, ModelError, SyncError
from rlhf.types import Turn

from rlhf_engines.requests import NewTokens, OpenRequest
from rlhf_engines.weight_files import PROTOCOL, digest

T = TypeVar("T")
EVENT = b"data: {"
CONNECT = 10.0
"""Timeout for a connection, in seconds."""
IDLE = 2.0
"""Seconds that an unused connection is kept. This is less than the servers' 5 seconds, because a request could be lost
when the server closes a connection."""


class EngineServer(ABC):
    """Talks to one server; all methods run in one event loop.

    Args:
        headers: headers of requests for samples.
        timeout: seconds for the answer to one request.
        attempts: number of attempts per request if connections fail.
    """

    generator: ClassVar[str]
    """Name of the generator. ``plugin``: its distribution. ``start``: the command that starts a server, for
    messages."""
    plugin: ClassVar[str]
    start: ClassVar[str]
    keys: ClassVar[str]
    """The options with the servers' keys, for messages."""
    health: ClassVar[str] = "/health"
    path: ClassVar[str]
    """Path for requests for samples."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float, attempts: int) -> None:
        self.url, self.timeout, self.attempts = url, timeout, attempts
        limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE)
        patience = httpx.Timeout(timeout, connect=CONNECT)
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, timeout=patience, trust_env=False
        )
        self.facts: dict[str, Any] = {}
        """Facts of the server's first worker: ``protocol``, ``digest``, ``dtype``, ``formats``, ``length``,
        ``vocabulary``, ``quantization``, ``speculative``, ``data_parallel``, and additional facts of the engine."""

    async def close(self) -> None:
        await self._client.aclose()

    # ------------------------------------------------------------------------------------- weights

    @abstractmethod
    async def call(self, method: str, *arguments: str | None, timeout: float) -> list[Any]:
        """Call a method of the workers. Returns the answer of each worker. Raises SyncError."""

    @abstractmethod
    async def pause(self, timeout: float) -> None:
        """Pause sampling until :meth:`resume`. Raises SyncError."""

    @abstractmethod
    async def resume(self, timeout: float) -> None: ...

    async def control(
        self, path: str, label: str, timeout: float, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """The answer to a call other than a request for samples. Raises SyncError, which names ``label``."""
        try:
            response = await self._client.post(path, json=body, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise SyncError(f"the server {self.url} did not answer {label}: {_words(error)}") from error
        if response.status_code != 200:
            hint = f". {self.keys}" if response.status_code in (401, 403) else ""
            raise SyncError(f"the server {self.url} refused {label}: {_start(response)}{hint}")
        return response

    async def meet(self, file: Path) -> None:
        """Read :attr:`facts`. Each worker must see ``file``.

        Raises CapabilityError if this generator cannot use the server.
        """
        label = f"generator {self.generator!r}: {self.url}"
        try:
            health = await self._client.get(self.health, timeout=self.timeout)
        except httpx.HTTPError as error:
            raise CapabilityError(f"{label} does not answer: {_words(error)}. Start it: {self.start}") from error
        if health.status_code != 200:
            hint = f". {self.keys}" if health.status_code in (401, 403) else ""
            raise CapabilityError(f"{label}{self.health} answers {_start(health)}{hint}")
        try:
            workers = await self.call("rlhf_facts", str(file), timeout=self.timeout)
        except (SyncError, LookupError, ValueError, TypeError) as error:
            raise CapabilityError(
                f"{label} cannot take weights: {error}. Start it in an "
                f"environment with the plugin {self.plugin}, where it sees {str(file)!r}: {self.start}"
            ) from error
        self.facts = workers[0]
        for worker in workers:
            if worker["protocol"] != PROTOCOL:
                raise CapabilityError(
                    f"{label} has a different version of {self.plugin}. Install the same version on both sides."
                )
            if worker["digest"] != digest(file):
                raise CapabilityError(
                    f"{label} sees a different file at {str(file)!r}. Set `folder` to a folder "
                    "that this process and the servers share."
                )

    # ------------------------------------------------------------------------------------ sampling

    @abstractmethod
    async def logprobs(self, sequences: Sequence[Sequence[int]], salt: str) -> list[list[float]]:
        """Log-probs at temperature 1 of every token except the first of each sequence. Raises ModelError.

        Args:
            salt: keys and values that were cached under another salt are not read.
        """

    @abstractmethod
    def new_tokens(self, answer: Any, count: int) -> Iterable[NewTokens]:
        """The tokens that an answer, or an event of a stream, adds to the first ``count`` tokens of a sample."""

    async def sample(self, begin: Callable[[], OpenRequest], body: dict[str, Any]) -> Turn:
        """The turn of a request. ``begin`` creates the request again for each attempt. Raises ModelError."""
        return await self.attempted(lambda: self._draw(begin(), body))

    async def _draw(self, sample: OpenRequest, body: dict[str, Any]) -> Turn:
        answers = self._stream(body) if sample.watches else self._single_answer(body)
        async with aclosing(answers):  # if it is closed early, the server drops the request
            async for answer in answers:
                for tokens in self.new_tokens(answer, sample.count):
                    if (completion := sample.add(tokens)) is not None:
                        return completion[0]
        raise ModelError(f"the server {self.url} sent an incomplete answer")

    async def _single_answer(self, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        yield await self.ask(body)

    async def ask(self, body: dict[str, Any]) -> Any:
        response = await self._client.post(self.path, json=body)
        if response.status_code != 200:
            raise self._refusal(response)
        return response.json()

    async def _stream(self, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        async with self._client.stream("POST", self.path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
                raise self._refusal(response)
            async for line in _lines(response):
                if line.startswith(EVENT):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise ModelError(f"the server {self.url} failed: {event['error']}")
                    yield event

    async def attempted(self, request: Callable[[], Awaitable[T]]) -> T:
        for attempt in count(1):
            try:
                return await request()
            except httpx.TransportError as error:
                if attempt >= self.attempts or isinstance(error, httpx.ReadTimeout):
                    raise ModelError(f"the server {self.url} did not answer: {_words(error)}") from error
            await asyncio.sleep(attempt)
        raise AssertionError

    def _refusal(self, response: httpx.Response) -> ModelError:
        return ModelError(f"the server {self.url} refused a request: {_start(response)}")


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The lines of a stream of events."""
    # httpx's aiter_lines() also ends a line at U+2028 and U+0085, which servers write unescaped inside JSON.
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def _start(response: httpx.Response) -> str:
    return f"HTTP status {response.status_code}, {response.text[:300]!r}"


def _words(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__} {error}".strip()
