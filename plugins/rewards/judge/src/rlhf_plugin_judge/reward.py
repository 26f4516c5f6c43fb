"""The reward: asks a judge about each answer, or about each pair of a group's answers."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhf.errors import ConfigError, RewardError
from rlhf.interfaces import ComponentConfig, Reward
from rlhf.types import Group, RewardResult, Trajectory

from rlhf_plugin_judge.config import JudgeConfig
from rlhf_plugin_judge.judge_endpoint import JudgeEndpoint, Reply, Unavailable
from rlhf_plugin_judge.questions import Messages, Questions
from rlhf_plugin_judge.verdicts import WINS, Form, InvalidVerdict, Scores, Winner

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds before the second attempt, doubled before each further one, and their limit."""
FENCE = "answer"
"""Mark around an answer in the cache key, for which the question is rendered but not sent."""


@dataclass(slots=True)
class _Judgement:
    """A verdict and its cost. Token counts are None if the server does not report them."""

    verdict: dict[str, Any]
    tokens: tuple[int, int] | None = (0, 0)
    cached: bool = False


class JudgeReward(Reward):
    """A judgement is JSON of one form (:mod:`rlhf_plugin_judge.verdicts`). If the judge's answer has another form, the
    judge is asked again and told what is wrong. After ``attempts`` requests without a judgement the sample fails; it
    never gets a reward of 0.
    """

    name = "judge"
    source = "Zheng et al. 2023, arXiv:2306.05685"
    Config = JudgeConfig
    layout = frozenset({"url", "token_env", "timeout", "attempts", "max_requests", "cache", "price"})
    reads = "text"

    def __init__(self, config: ComponentConfig | None = None) -> None:
        if config is None:
            raise ConfigError("reward 'judge' needs `url` and `model`: the judge's server and model")
        super().__init__(config)
        c: JudgeConfig = self.config
        self.per_sample = c.mode == "rubric"
        self._scores = Scores({name: c.weights.get(name, 1.0) for name in c.criteria}, c.scale)
        self._form: Form = Winner() if c.mode == "pairwise" else self._scores
        self._questions = Questions(c, self._form)
        self._cache = Cache(c.cache)
        self._endpoint = JudgeEndpoint(c.url, c.token_env, c.timeout, c.max_requests)
        self._warned = self._warned_of_images = False

    def columns(self) -> tuple[str, ...]:
        """A template may read further columns. They are known only when it is rendered."""
        return () if self.config.reference is None else (self.config.reference,)

    async def score(self, group: Group) -> list[RewardResult]:
        if not self._warned_of_images and any(turn.images for t in group.trajectories for turn in t.turns):
            _LOG.warning("reward 'judge': samples have images, which the judge does not see: it reads texts only.")
            self._warned_of_images = True
        if self.config.mode == "pairwise":
            return await self._compare(group)
        return await _all(self._rate(t) for t in group.trajectories)

    async def _rate(self, trajectory: Trajectory) -> RewardResult:
        judgement = await self._judge(trajectory, {"answer": trajectory.answer, "completion": trajectory.completion})
        scores = {f"score_{name}": score for name, score in judgement.verdict["scores"].items()}
        return RewardResult(self._scores.value(judgement.verdict), info=scores | self._costs([judgement], 1))

    async def _compare(self, group: Group) -> list[RewardResult]:
        """The share of comparisons that each answer wins. The reward does not apply to an answer without a rival."""
        answers = group.trajectories
        if len(answers) == 1:
            return [RewardResult(None)]
        pairs = list(itertools.permutations(range(len(answers)), 2))
        judgements = await _all(
            self._judge(answers[a], {"answer_a": answers[a].answer, "answer_b": answers[b].answer}) for a, b in pairs
        )
        won = [0.0] * len(answers)
        for (a, b), judgement in zip(pairs, judgements, strict=True):
            share = WINS[judgement.verdict["winner"]]
            won[a] += share
            won[b] += 1 - share
        games, info = 2 * (len(answers) - 1), self._costs(judgements, len(answers))
        return [RewardResult(wins / games, info=dict(info)) for wins in won]

    async def _judge(self, trajectory: Trajectory, answers: Mapping[str, str]) -> _Judgement:
        c, columns = self.config, trajectory.row.columns
        prompt = trajectory.prompt_text
        settings = {"model": c.model, "body": dict(c.body), "response_format": c.response_format}
        settings["answers"] = dict(answers)  # whose texts may contain the mark
        key = key_of({**settings, "messages": self._questions.messages(FENCE, prompt, answers, columns)})
        if (verdict := self._cache.get(key)) is not None:
            try:
                return _Judgement(self._form.checked(verdict), cached=True)
            except InvalidVerdict:
                pass  # the file was changed: ask again
        fence = f"{FENCE}-{secrets.token_hex(8)}"
        judgement = await self._ask(self._questions.messages(fence, prompt, answers, columns))
        self._cache.put(key, judgement.verdict)
        return judgement

    async def _ask(self, messages: Messages) -> _Judgement:
        body = {**self.config.body, "model": self.config.model} | self._response_format()
        failures: list[str] = []
        used: tuple[int, int] | None = (0, 0)
        retry_messages: Messages = []
        for attempt in range(self.config.attempts):
            try:
                reply = await self._endpoint.ask({**body, "messages": [*messages, *retry_messages]})
            except Unavailable as error:
                failures.append(str(error))
                if attempt + 1 < self.config.attempts:
                    pause = min(LONGEST_PAUSE, PAUSE * 2**attempt)
                    await asyncio.sleep(pause if error.after is None else error.after)
                continue
            used = _added(used, reply)
            try:
                return _Judgement(self._form.read(reply.text), used)
            except InvalidVerdict as error:
                cut = " It was cut off at its largest number of tokens." if reply.finish == "length" else ""
                failures.append(f"the judge answered {reply.text[:80]!r}, but {error}.{cut}")
                retry_messages = [
                    {"role": "assistant", "content": reply.text},
                    {"role": "user", "content": f"This cannot be read: {error}. Reply with the JSON object alone."},
                ]
        reasons = "; ".join(dict.fromkeys(failures))
        raise RewardError(f"no judgement in {self.config.attempts} attempts: {reasons}")

    def _response_format(self) -> dict[str, Any]:
        if self.config.response_format == "json_schema":
            schema = {"name": "verdict", "strict": True, "schema": self._form.schema}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        if self.config.response_format == "json_object":
            return {"response_format": {"type": "json_object"}}
        return {}

    def _costs(self, judgements: list[_Judgement], samples: int) -> dict[str, float]:
        """The cost of a call's judgements, per sample."""
        costs = {"cached": sum(judgement.cached for judgement in judgements) / len(judgements)}
        token_counts = [judgement.tokens for judgement in judgements if judgement.tokens is not None]
        if len(token_counts) < len(judgements):
            if not self._warned:
                _LOG.warning("reward 'judge': the server does not count tokens (usage), so costs are not reported.")
                self._warned = True
            return costs
        prompt, completion = (sum(column) / samples for column in zip(*token_counts, strict=True))
        costs |= {"prompt_tokens": prompt, "completion_tokens": completion}
        if self.config.price is not None:
            costs["cost"] = (prompt * self.config.price[0] + completion * self.config.price[1]) / 1e6
        return costs


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all concurrently. After the first failure the others are cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _added(used: tuple[int, int] | None, reply: Reply) -> tuple[int, int] | None:
    if used is None or reply.prompt_tokens is None or reply.completion_tokens is None:
        return None
    return used[0] + reply.prompt_tokens, used[1] + reply.completion_tokens


IN_MEMORY = 100_000
"""Largest number of judgements in memory. The oldest is dropped first."""


def key_of(request: dict[str, Any]) -> str:
    """The hash of everything that decides a judgement."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


class Cache:
    """Cache of judgements. A folder holds one small file per judgement, ``{"verdict": {...}}``, named by its key. The
    files contain no prompts and no tokens. Several runs may use the folder at once.

    Raises ConfigError if the folder cannot be created.
    """

    def __init__(self, folder: str | None) -> None:
        self._verdicts: OrderedDict[str, Any] = OrderedDict()
        self._folder = None if folder is None else Path(folder).expanduser()
        self._is_writable = True
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"reward 'judge': cache = {folder!r} cannot be created: {error}") from None

    def get(self, key: str) -> Any:
        """A judgement; None if it is not there, or its file is damaged."""
        if key in self._verdicts:
            return self._verdicts[key]
        if self._folder is None:
            return None
        try:
            return json.loads((self._folder / f"{key}.json").read_text(encoding="utf-8"))["verdict"]
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def put(self, key: str, verdict: dict[str, Any]) -> None:
        self._verdicts[key] = verdict
        while len(self._verdicts) > IN_MEMORY:
            self._verdicts.popitem(last=False)
        if self._folder is None:
            return
        temporary = self._folder / f"{key}.{secrets.token_hex(4)}"
        try:
            temporary.write_text(json.dumps({"verdict": verdict}), encoding="utf-8")
            os.replace(temporary, self._folder / f"{key}.json")  # readers see the whole file or no file
        except OSError as cause:  # a full disk: the judgement is used without being stored
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if self._is_writable:
                _LOG.warning(
                    "reward 'judge': cache = '%s': a judgement cannot be written there: %s. It counts in this run, and "
                    "later runs ask for it again. Free some space, or name another folder.",
                    self._folder,
                    cause.strerror,
                )
            self._is_writable = False
