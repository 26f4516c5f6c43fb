"""The reward: asks a server for the scores of a group."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Any

import httpx
from pydantic import Field, field_validator
from rlhf.errors import ConfigError, RewardError, shown
from rlhf.interfaces import ComponentConfig, Reward, RewardContext, Tokens
from rlhf.types import Group, RewardResult, Row, Trajectory

_LOG = logging.getLogger(__name__)
LONGEST = 10 * 2**20
"""Bytes of an answer; a longer one is refused."""
PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds before the second attempt, doubled before each further one, and their limit."""


class HttpConfig(ComponentConfig):
    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Addresses of servers that give the same scores. They are asked in turn."""
    label: str | None = None
    """Row column that is sent as ``labels``. If absent: ``label``, else ``answer``, else an empty text."""
    special_tokens: bool = False
    """Send the text of all tokens, special tokens included, so that a reward model sees the start and end of messages
    and answers. Without it: the texts that other rewards see."""
    token_env: str | None = None
    """Environment variable that holds a token, sent as ``Authorization: Bearer``."""
    timeout: Annotated[float, Field(gt=0)] = 20.0
    """Seconds for one request to one server. Then the next server is asked."""
    attempts: Annotated[int, Field(gt=0)] = 3
    """How often all servers are asked before the samples count as failed."""
    rest: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that a server which failed is left out, as long as another one answers."""

    @field_validator("urls")
    @classmethod
    def _web_addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not an address of the web: it must begin with http:// or https://")
        if len(set(urls)) != len(urls):
            raise ValueError("the same address is given twice")
        return urls


class HttpReward(Reward):
    """``POST {"query": [...], "prompts": [...], "labels": [...]}`` for each group; a query is the prompt with the
    answer. See :func:`results` for what the server answers.

    A server that cannot be reached, is too slow or answers with an HTTP status of 429 or above 499 has failed, and the
    next one is asked. Any other answer that is not understood is an error at once, because every server would give it.
    Redirects are not followed.
    """

    name = "http"
    source = "the remote reward models of OpenRLHF"
    Config = HttpConfig

    def __init__(self, config: HttpConfig) -> None:
        super().__init__(config)
        self.reads = "tokens" if config.special_tokens else "text"
        self._servers = Servers(config.urls, config.rest)
        self._headers = {}
        if config.token_env is not None:
            token = os.environ.get(config.token_env)
            if not token:
                raise ConfigError(
                    f"reward 'http': token_env = {config.token_env!r}, but this environment variable is not set. "
                    "Export it, or remove token_env."
                )
            self._headers["Authorization"] = f"Bearer {token}"
        self._tokens: Tokens | None = None
        self._certificates = ssl.create_default_context()  # made once, because it takes longer than a request

    def columns(self) -> tuple[str, ...]:
        return () if self.config.label is None else (self.config.label,)

    async def setup(self, context: RewardContext) -> None:
        self._tokens = context.tokens

    async def score(self, group: Group) -> list[RewardResult]:
        texts = [self._texts(t) for t in group.trajectories]
        question = {
            "query": [prompt + completion for prompt, completion in texts],
            "prompts": [prompt for prompt, _ in texts],
            "labels": [_label(group.row, self.config.label)] * len(group.trajectories),
        }
        failures: list[str] = []
        for attempt in range(self.config.attempts):
            if attempt:
                await asyncio.sleep(min(LONGEST_PAUSE, PAUSE * 2 ** (attempt - 1)))
            for url in self._servers.order():
                try:
                    body = await self._ask(url, question)
                except (httpx.TransportError, TimeoutError, _Unavailable) as error:
                    slow = isinstance(error, TimeoutError | httpx.TimeoutException)
                    why = f"{url}: {f'no answer in {self.config.timeout:g} s' if slow else str(error) or repr(error)}"
                    failures.append(why)
                    if self._servers.failed(url) and len(self.config.urls) > 1:
                        _LOG.warning("reward 'http': %s. It is left out for %g s.", why, self.config.rest)
                else:
                    self._servers.answered(url)
                    return results(body, len(group.trajectories), url)
        why = "; ".join(dict.fromkeys(failures))
        raise RewardError(f"no server answered in {self.config.attempts} attempts: {why}")

    def _texts(self, trajectory: Trajectory) -> tuple[str, str]:
        """The prompt, and what follows it."""
        if not self.config.special_tokens:
            return trajectory.prompt_text, trajectory.completion
        if self._tokens is None:
            raise RewardError("reward 'http': special_tokens = true needs the policy's tokenizer, which this run lacks")
        turns = trajectory.turns
        first = next((n for n, turn in enumerate(turns) if turn.sampled), len(turns))
        prompt, rest = ([i for turn in part for i in turn.ids] for part in (turns[:first], turns[first:]))
        return self._tokens.decode(prompt), self._tokens.decode(rest)

    async def _ask(self, url: str, question: dict[str, Any]) -> bytes:
        async with (
            asyncio.timeout(self.config.timeout),  # httpx limits each read only
            httpx.AsyncClient(timeout=self.config.timeout, verify=self._certificates) as client,
            client.stream("POST", url, json=question, headers=self._headers) as response,
        ):
            if response.status_code == 429 or response.status_code > 499:
                raise _Unavailable(f"HTTP status {response.status_code}")
            body = b""
            async for part in response.aiter_bytes():
                body += part
                if len(body) > LONGEST:
                    raise RewardError(f"{url} answered more than {LONGEST // 2**20} MiB")
            if response.status_code != 200:
                start = body[:200].decode(errors="replace")
                raise RewardError(f"{url} answered with HTTP status {response.status_code}: {start!r}")
            return body


class _Unavailable(Exception):
    """The server answers, but not now."""


def _label(row: Row, column: str | None) -> Any:
    if column is None:
        return row.get("label", row.get("answer", ""))
    if column not in row.columns:
        raise RewardError(f"reward 'http' sends the column {column!r} as labels; the row has {sorted(row.columns)}")
    return row[column]


def results(body: bytes, samples: int, url: str) -> list[RewardResult]:
    """One result per sample.

    Args:
        body: ``{"rewards": [...], "scores": [...], "extra_logs": {name: [...]}}``; only ``rewards`` is required.

    Raises RewardError for anything else.
    """
    try:
        answer = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        start = body[:80].decode(errors="replace")
        raise RewardError(f"{url} answered {start!r}, which is not JSON: {error}. The reward expects JSON.") from None
    if not isinstance(answer, Mapping) or "rewards" not in answer:
        raise RewardError(f"{url} answered {shown(answer)}. The reward expects an object with the key 'rewards'.")
    values = _numbers(answer["rewards"], "rewards", samples, url)
    scores = answer.get("scores")
    filtered: list[float] | list[None] = [None] * samples
    if scores is not None:
        filtered = _numbers(scores, "scores", samples, url)
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise RewardError(f"{url} answered extra_logs = {shown(logs)}. The reward expects an object of lists.")
    columns = {str(name): _numbers(column, f"extra_logs.{name}", samples, url) for name, column in logs.items()}
    return [
        RewardResult(value, score, info={name: column[n] for name, column in columns.items()})
        for n, (value, score) in enumerate(zip(values, filtered, strict=True))
    ]


def _numbers(values: Any, name: str, samples: int, url: str) -> list[float]:
    if not isinstance(values, list) or len(values) != samples:
        summary = f"{len(values)} values" if isinstance(values, list) else shown(values)
        raise RewardError(
            f"{url} answered {summary} as {name!r} of {samples} samples. The reward expects one per sample."
        )
    for n, value in enumerate(values):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise RewardError(f"{url} answered {shown(value)} as {name}[{n}]. The reward expects a finite number.")
    return [float(value) for value in values]


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is a number that is not finite")


class Servers:
    """Several servers that give the same answers: which one is asked next, and which are left out for a while.

    Args:
        urls: at least one.
        rest: seconds that a server is left out after it failed.
    """

    def __init__(self, urls: Sequence[str], rest: float) -> None:
        self._urls, self._rest = list(urls), rest
        self._until = dict.fromkeys(self._urls, 0.0)
        """{URL: time until which it is left out}."""
        self._turn = count()

    def order(self) -> Iterator[str]:
        """The servers to ask for one request, the first first. Requests begin at the servers in turn. Servers that are
        left out come last, the one that failed first before the others."""
        n = next(self._turn) % len(self._urls)
        turned = [*self._urls[n:], *self._urls[:n]]
        now = time.monotonic()
        yield from sorted(turned, key=lambda url: max(0.0, self._until[url] - now))

    def failed(self, url: str) -> bool:
        """Leave a server out. Returns whether it was not left out already."""
        now = time.monotonic()
        fresh = self._until[url] <= now
        self._until[url] = now + self._rest
        return fresh

    def answered(self, url: str) -> None:
        """Ask the server again in its turn."""
        self._until[url] = 0.0
