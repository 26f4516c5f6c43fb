"""One request to an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import ssl
import time
from dataclasses import dataclass
from typing import Any

import httpx
from rlhf.errors import RewardError, brief
from rlhf.secrets import read_token

LONGEST = 10 * 2**20
"""Largest size of an answer in bytes. A larger one is refused."""
LONGEST_WAIT = 60.0
"""Largest number of seconds that ``Retry-After`` may request."""


class Unavailable(Exception):
    """The server may answer later."""

    def __init__(self, cause: str, after: float | None = None) -> None:
        super().__init__(cause)
        self.after = after
        """Seconds after which the server may be asked again; None: not stated."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The text of the first choice, its finish reason, and its token counts (None if the server does not report
    them)."""

    text: str
    finish: str | None
    prompt_tokens: int | None
    completion_tokens: int | None


class JudgeEndpoint:
    """Args:
    url: up to ``/v1``.
    token_env: environment variable that holds a token; None: none is sent.
    timeout: seconds for one request.

    Raises ConfigError if the variable is not set, or holds no token.
    """

    def __init__(self, url: str, token_env: str | None, timeout: float, at_once: int) -> None:
        self._url, self._timeout = f"{url.rstrip('/')}/chat/completions", timeout
        self._headers = {}
        if token_env is not None:
            token = read_token("reward 'judge'", "token_env", token_env)
            self._headers["Authorization"] = f"Bearer {token}"
        self._turns = asyncio.Semaphore(at_once)
        self._certificates = ssl.create_default_context()  # created once, because this takes longer than a request

    async def ask(self, body: dict[str, Any]) -> Reply:
        """Send one request. Raises Unavailable if the server cannot be reached, is too slow, sends a damaged answer, or
        answers with status 429 or above 499, and RewardError for any other answer that cannot be read. Redirects are
        not followed."""
        async with self._turns:
            try:
                return self._read(await self._post(body))
            except (httpx.TransportError, httpx.DecodingError, TimeoutError) as error:
                slow = isinstance(error, TimeoutError | httpx.TimeoutException)
                cause = f"no answer in {self._timeout:g} s" if slow else str(error) or repr(error)
                raise Unavailable(f"{self._url}: {cause}") from None

    async def _post(self, body: dict[str, Any]) -> bytes:
        async with (
            asyncio.timeout(self._timeout),  # httpx limits each read only
            httpx.AsyncClient(timeout=self._timeout, verify=self._certificates) as client,
            client.stream("POST", self._url, json=body, headers=self._headers) as response,
        ):
            data = b""
            async for part in response.aiter_bytes():
                data += part
                if len(data) > LONGEST:
                    raise RewardError(f"{self._url} answered more than {LONGEST // 2**20} MiB")
            status, start = response.status_code, data[:200].decode(errors="replace")
            if status == 429 or status > 499:
                after = _seconds(response.headers.get("Retry-After"))
                raise Unavailable(f"{self._url} answered with HTTP status {status}: {start!r}", after)
            if status != 200:
                raise RewardError(f"{self._url} answered with HTTP status {status}: {start!r}")
            return data

    def _read(self, body: bytes) -> Reply:
        try:
            answer = json.loads(body)
            choice = answer["choices"][0]
            text, finish = choice["message"]["content"], choice.get("finish_reason")
            usage = answer.get("usage") or {}
            counts = [usage.get("prompt_tokens"), usage.get("completion_tokens")]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            start = body[:80].decode(errors="replace")
            raise RewardError(f"{self._url} answered {start!r}, which is not the JSON of a chat completion") from None
        if text is None:  # a refusal, or only reasoning
            text = ""
        if not isinstance(text, str) or any(count is not None and not _is_count(count) for count in counts):
            raise RewardError(
                f"{self._url} answered content {brief(text)}, usage {brief(usage)}; expected text, counts"
            )
        return Reply(text, finish, counts[0], counts[1])


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53  # so that means and prices of counts are floats


def _seconds(after: str | None) -> float | None:
    """The header ``Retry-After``: seconds or a date. None if it is absent or neither."""
    if after is None:
        return None
    try:
        seconds = float(after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(after).timestamp() - time.time()
        except (ValueError, OverflowError):  # OverflowError: a number of 20 digits
            return None
    return min(LONGEST_WAIT, max(0.0, seconds)) if math.isfinite(seconds) else None
