"""Servers with equal answers: their options, and requests to the first available one."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Annotated, Any

import httpx
from pydantic import Field, field_validator
from rlhf.errors import RewardError
from rlhf.interfaces import ComponentConfig
from rlhf.secrets import read_token

_LOG = logging.getLogger(__name__)
LONGEST = 10 * 2**20
"""Largest size of an answer in bytes. A larger one is refused."""
PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds before the second attempt, doubled before each further one, and their limit."""


class ServersConfig(ComponentConfig):
    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Addresses of servers that give the same scores. They are asked in turn."""
    token_env: str | None = None
    """Environment variable that holds a token, sent as ``Authorization: Bearer``."""
    timeout: Annotated[float, Field(gt=0)] = 20.0
    """Seconds for one request to one server. Then the next server is asked."""
    attempts: Annotated[int, Field(gt=0)] = 3
    """How often all servers are asked before the samples count as failed."""
    rest: Annotated[float, Field(ge=0)] = 30.0
    """Seconds for which a failed server is skipped, as long as another server answers."""

    @field_validator("urls")
    @classmethod
    def _web_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not a web address: it must begin with http:// or https://")
        if len(set(urls)) != len(urls):
            raise ValueError("the same address is given twice")
        return urls


LAYOUT = frozenset({"urls", "token_env", "timeout", "attempts", "rest"})
"""Options that may change on resume: other servers give the same scores."""


class Servers:
    """If a server cannot be reached, is too slow, sends a damaged answer or answers with an HTTP status of 429 or above
    499, it has failed, and the next server is asked. Any other status than 200 is an error without a retry, because
    every server would answer the same. Redirects are not followed.

    Args:
        reward: name of the plugin, for messages.

    Raises ConfigError if the variable of ``token_env`` is not set, or holds no token.
    """

    def __init__(self, reward: str, config: ServersConfig) -> None:
        self._reward, self._config = reward, config
        self._order = Order(config.urls, config.rest)
        self._headers = {}
        if config.token_env is not None:
            token = read_token(f"reward {reward!r}", "token_env", config.token_env)
            self._headers["Authorization"] = f"Bearer {token}"
        self._certificates = ssl.create_default_context()  # created once, because this takes longer than a request

    async def ask(
        self, question: dict[str, Any], path: str = "", longest: int = LONGEST, server: str | None = None
    ) -> tuple[str, bytes]:
        """(URL, answer) of the first server that answers. Raises RewardError.

        Args:
            path: appended to each address.
            longest: largest size of an answer in bytes.
            server: the only address to ask.
        """
        failures: list[str] = []
        for attempt in range(self._config.attempts):
            if attempt:
                await asyncio.sleep(min(LONGEST_PAUSE, PAUSE * 2 ** (attempt - 1)))
            for url in self._order.urls() if server is None else (server,):
                try:
                    body = await self._post(f"{url.rstrip('/')}{path}" if path else url, question, longest)
                except (httpx.TransportError, httpx.DecodingError, TimeoutError, _Unavailable) as error:
                    slow = isinstance(error, TimeoutError | httpx.TimeoutException)
                    text = f"{url}: {f'no answer in {self._config.timeout:g} s' if slow else str(error) or repr(error)}"
                    failures.append(text)
                    if self._order.failed(url) and len(self._config.urls) > 1:
                        _LOG.warning(
                            "reward %r: %s. The server is not used for %g s.", self._reward, text, self._config.rest
                        )
                else:
                    self._order.answered(url)
                    return url, body
        reasons = "; ".join(dict.fromkeys(failures))
        raise RewardError(f"no server answered in {self._config.attempts} attempts: {reasons}")

    async def _post(self, url: str, question: dict[str, Any], longest: int) -> bytes:
        async with (
            asyncio.timeout(self._config.timeout),  # httpx limits each read only
            httpx.AsyncClient(timeout=self._config.timeout, verify=self._certificates) as client,
            client.stream("POST", url, json=question, headers=self._headers) as response,
        ):
            if response.status_code == 429 or response.status_code > 499:
                raise _Unavailable(f"HTTP status {response.status_code}")
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > longest:
                    raise RewardError(f"{url} answered more than {longest // 2**20} MiB")
            if response.status_code != 200:
                start = body[:200].decode(errors="replace")
                raise RewardError(f"{url} answered with HTTP status {response.status_code}: {start!r}")
            return bytes(body)


class _Unavailable(Exception):
    """The server is temporarily unavailable."""


class Order:
    """The order in which servers are asked. Failed servers are left out for a while.

    Args:
        urls: at least one.
        rest: seconds that a server is left out after it failed.
    """

    def __init__(self, urls: Sequence[str], rest: float) -> None:
        self._urls, self._rest = list(urls), rest
        self._retry_times = dict.fromkeys(self._urls, 0.0)
        """{URL: time until which it is left out}."""
        self._turn = count()

    def urls(self) -> Iterator[str]:
        """The servers to ask for one request, in order. Successive requests begin with different servers in turn.
        Servers that are left out come last, in the order in which they failed."""
        n = next(self._turn) % len(self._urls)
        turned = [*self._urls[n:], *self._urls[:n]]
        time_s = time.monotonic()
        yield from sorted(turned, key=lambda url: max(0.0, self._retry_times[url] - time_s))

    def failed(self, url: str) -> bool:
        """Leave a server out. Returns False if it was already left out."""
        time_s = time.monotonic()
        fresh = self._retry_times[url] <= time_s
        self._retry_times[url] = time_s + self._rest
        return fresh

    def answered(self, url: str) -> None:
        """Ask the server again in its turn."""
        self._retry_times[url] = 0.0
