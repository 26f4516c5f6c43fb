"""A teacher on a server: its log-prob of every token that the policy sampled."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from rlhf.errors import ConfigError, RewardError, brief
from rlhf.interfaces import Reward, RewardContext
from rlhf.types import Group, RewardResult, Trajectory

from rlhf_plugin_http.servers import LAYOUT, LONGEST, Servers, ServersConfig

PATH = "/completions"
REQUEST = 16_384
"""Largest number of tokens of a request. A longer sequence gets its own request."""
TOKEN = 1024
"""Allowed bytes of an answer for each token, in addition to ``LONGEST``."""
PROBE = "The 7 quick foxes jump over 1,024 lazy dogs.\n\tdef area(r): return 3.14 * r ** 2  # naïve café\n日本語 🙂"
"""Text with many kinds of tokens."""
ABOVE_0 = 1e-3
"""Largest log-prob above 0 that rounding may produce."""

Place = tuple[int, int, int]
"""(turn, token of the turn, token of the sequence)."""


class TeacherRewardConfig(ServersConfig):
    model: str | None = None
    """Name of the model on the servers. Absent: the model that they answer with."""


class TeacherReward(Reward):
    """``POST {"prompt": [token ids, ...], "prompt_logprobs": 0, "max_tokens": 1, ...}`` to ``URL/completions``, vLLM's
    form of the OpenAI protocol: the tokens of a group's samples, in requests of at most 16,384 tokens. The log-probs of
    the sampled tokens are the steps of each result, and the algorithm's ``teacher`` reads them.

    Before the first sample, the same text is sent to each server as text and as the policy's tokens. A server whose
    tokens differ is refused.
    """

    name = "teacher"
    source = "on-policy distillation from a server, https://arxiv.org/abs/2601.02780"
    Config = TeacherRewardConfig
    layout = LAYOUT
    is_teacher = True

    def __init__(self, config: TeacherRewardConfig) -> None:
        super().__init__(config)
        self._servers = Servers(self.name, config)

    async def setup(self, context: RewardContext) -> None:
        if context.tokens is None:
            raise ConfigError("reward 'teacher' needs the policy's tokenizer, which this run does not provide")
        ids = context.tokens.encode(PROBE)
        await asyncio.gather(*(self._probe(url, ids) for url in self.config.urls))

    async def score(self, group: Group) -> list[RewardResult]:
        sequences: list[Sequence[int]] = []
        places: list[tuple[int, list[Place]]] = []
        for n, trajectory in enumerate(group.trajectories):
            for ids, sequence_places in _sequences(trajectory):
                sequences.append(ids)
                places.append((n, sequence_places))
        answers = await asyncio.gather(*(self._logprobs(part) for part in _requests(sequences)))
        steps: list[list[tuple[int, int, float]]] = [[] for _ in group.trajectories]
        for (n, sequence_places), values in zip(places, (v for answer in answers for v in answer), strict=True):
            steps[n] += [(turn, token, values[position]) for turn, token, position in sequence_places]
        return [RewardResult(None, steps=tuple(trajectory_steps)) for trajectory_steps in steps]

    async def _logprobs(self, sequences: Sequence[Sequence[int]], server: str | None = None) -> list[list[float]]:
        """The log-prob of each token of each sequence; NaN for the first token."""
        longest = LONGEST + TOKEN * sum(map(len, sequences))
        url, body = await self._servers.ask(self._question([list(ids) for ids in sequences]), PATH, longest, server)
        choices = _choices(body, len(sequences), url)
        pairs = enumerate(zip(choices, sequences, strict=True))
        return [_values(choice, ids, f"{url}, sequence {n}") for n, (choice, ids) in pairs]

    def _question(self, prompt: str | list[list[int]]) -> dict[str, Any]:
        model = {} if self.config.model is None else {"model": self.config.model}
        return {**model, "prompt": prompt, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0}

    async def _probe(self, url: str, ids: Sequence[int]) -> None:
        """Raises ConfigError: the server cannot score tokens, or its vocabulary is not the policy's."""
        try:
            question = {**self._question(PROBE), "add_special_tokens": False}
            _, body = await self._servers.ask(question, PATH, server=url)
            places = _choices(body, 1, url)[0]
            teacher_ids = [int(key) for place in places[1:] for key in place or {}]  # nothing predicts the first token
            if teacher_ids == list(ids[1:]):
                await self._logprobs([ids], url)
                return
        except (RewardError, ValueError, TypeError) as error:
            raise ConfigError(
                f"reward 'teacher': {url} cannot score the policy's tokens: {error}. It must be a vLLM server, or "
                "another server that supports prompt_logprobs at /v1/completions with prompts of token ids; `urls` end "
                "in /v1."
            ) from error
        pairs = enumerate(zip_longest(teacher_ids, ids[1:]), 1)
        place = next(n for n, (teacher_id, token) in pairs if teacher_id != token)
        raise ConfigError(
            f"reward 'teacher': the model of {url} has a different vocabulary from the policy's. A text of {len(ids)} "
            f"policy tokens has {len(teacher_ids) + 1} tokens there; they differ at token {place}. Use a teacher with "
            "the policy's tokenizer."
        )


def _sequences(trajectory: Trajectory) -> Iterator[tuple[list[int], list[Place]]]:
    """The tokens of each unbroken context up to its last sampled token, and the places of its sampled tokens."""
    ids: list[int] = []
    places: list[Place] = []
    for number, turn in enumerate(trajectory.turns):
        if turn.images:
            raise RewardError(
                "reward 'teacher' sends only text tokens, but the sample has images; use a role as teacher"
            )
        if turn.fresh and places:
            yield ids[: places[-1][2] + 1], places
        if turn.fresh:
            ids, places = [], []
        if turn.sampled:
            if turn.temperature != 1:
                raise RewardError(
                    f"reward 'teacher': turn {number} was sampled at temperature {turn.temperature:g}, but a server "
                    "returns log-probs at temperature 1. Set sampling.temperature 1, or use a role as teacher"
                )
            places += [(number, token, len(ids) + token) for token in range(len(turn.ids))]
        ids += turn.ids
    if places:
        yield ids[: places[-1][2] + 1], places


def _requests(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Parts of at most :data:`REQUEST` tokens, in order."""
    part: list[Sequence[int]] = []
    tokens = 0
    for ids in sequences:
        if part and tokens + len(ids) > REQUEST:
            yield part
            part, tokens = [], 0
        part.append(ids)
        tokens += len(ids)
    if part:
        yield part


def _choices(body: bytes, prompts: int, url: str) -> list[list[Any]]:
    """``prompt_logprobs`` of each prompt, in order."""
    try:
        choices = {choice["index"]: choice["prompt_logprobs"] for choice in json.loads(body)["choices"]}
        lists = [choices[n] for n in range(prompts)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        start = body[:120].decode(errors="replace")
        raise RewardError(
            f"{url} answered {start!r}, which is not one choice with prompt_logprobs for each of {prompts} prompts"
        ) from None
    if len(choices) != prompts or not all(isinstance(values, list) for values in lists):
        raise RewardError(
            f"{url} answered {len(choices)} choices to {prompts} prompts, with prompt_logprobs of the types "
            f"{sorted({type(values).__name__ for values in lists})}; allowed: one choice for each prompt, with a list"
        )
    return lists


def _values(places: Sequence[Any], ids: Sequence[int], server: str) -> list[float]:
    """The log-probs of the tokens ``ids`` in ``prompt_logprobs``; NaN for the first token, which nothing predicts."""
    if len(places) != len(ids):
        raise RewardError(f"{server}: {len(places)} log-probs for {len(ids)} tokens")
    values = [math.nan]
    for n, (place, token) in enumerate(zip(places[1:], ids[1:], strict=True), 1):
        if not isinstance(place, Mapping) or str(token) not in place:
            keys = ", ".join(map(str, place)) if isinstance(place, Mapping) else brief(place)
            raise RewardError(f"{server}: the log-prob of token {n} must be for {token}, got one for {keys[:80]}")
        logprob = place[str(token)]
        value: Any = logprob.get("logprob") if isinstance(logprob, Mapping) else logprob
        if type(value) not in (int, float) or not -sys.float_info.max <= value <= ABOVE_0:
            raise RewardError(
                f"{server}: the log-prob of token {n} is {brief(value)}; allowed: a finite number up to 0"
            )
        values.append(float(value))
    return values
