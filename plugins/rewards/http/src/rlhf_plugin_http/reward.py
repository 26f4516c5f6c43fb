"""The reward: asks a server for the scores of a group."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from rlhf.errors import RewardError, brief
from rlhf.interfaces import Reward, RewardContext, Tokens
from rlhf.types import Group, RewardResult, Row, Trajectory

from rlhf_plugin_http.servers import LAYOUT, Servers, ServersConfig

_LOG = logging.getLogger(__name__)


class HttpConfig(ServersConfig):
    label: str | None = None
    """Row column that is sent as ``labels``. If absent: ``label``, else ``answer``, else an empty text."""
    special_tokens: bool = False
    """Send the text of all tokens, including special tokens, so that a reward model sees the start and end of messages
    and answers. If False, send the texts that other rewards see."""


class HttpReward(Reward):
    """Sends ``POST {"query": [...], "prompts": [...], "labels": [...]}`` for each group. A query is the prompt with the
    answer. :func:`results` describes the server's answer. An answer in another form is an error, without a retry.
    """

    name = "http"
    source = "the remote reward models of OpenRLHF"
    Config = HttpConfig
    layout = LAYOUT

    def __init__(self, config: HttpConfig) -> None:
        super().__init__(config)
        self.reads = "tokens" if config.special_tokens else "text"
        self._servers = Servers(self.name, config)
        self._tokens: Tokens | None = None
        self._warned_of_images = False

    def columns(self) -> tuple[str, ...]:
        return () if self.config.label is None else (self.config.label,)

    async def setup(self, context: RewardContext) -> None:
        self._tokens = context.tokens

    async def score(self, group: Group) -> list[RewardResult]:
        if not self._warned_of_images and any(turn.images for t in group.trajectories for turn in t.turns):
            _LOG.warning("reward 'http': samples have images, which the server does not see: it gets texts only.")
            self._warned_of_images = True
        texts = [self._texts(t) for t in group.trajectories]
        question = {
            "query": [prompt + completion for prompt, completion in texts],
            "prompts": [prompt for prompt, _ in texts],
            "labels": [_label(group.row, self.config.label)] * len(group.trajectories),
        }
        url, body = await self._servers.ask(question)
        return results(body, len(group.trajectories), url)

    def _texts(self, trajectory: Trajectory) -> tuple[str, str]:
        """(prompt, text after it)."""
        if not self.config.special_tokens:
            return trajectory.prompt_text, trajectory.completion
        if self._tokens is None:
            raise RewardError(
                "reward 'http': special_tokens = true needs the policy's tokenizer, which this run does not provide"
            )
        turns = trajectory.turns
        first = next((n for n, turn in enumerate(turns) if turn.sampled), len(turns))
        prompt, rest = ([i for turn in part for i in turn.ids] for part in (turns[:first], turns[first:]))
        return self._tokens.decode(prompt), self._tokens.decode(rest)


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
        raise RewardError(f"{url} answered {brief(answer)}. The reward expects an object with the key 'rewards'.")
    values = _numbers(answer["rewards"], "rewards", samples, url)
    scores = answer.get("scores")
    filtered: list[float] | list[None] = [None] * samples
    if scores is not None:
        filtered = _numbers(scores, "scores", samples, url)
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise RewardError(f"{url} answered extra_logs = {brief(logs)}. The reward expects an object of lists.")
    columns = {str(name): _numbers(column, f"extra_logs.{name}", samples, url) for name, column in logs.items()}
    return [
        RewardResult(value, score, info={name: column[n] for name, column in columns.items()})
        for n, (value, score) in enumerate(zip(values, filtered, strict=True))
    ]


def _numbers(values: Any, name: str, samples: int, url: str) -> list[float]:
    if not isinstance(values, list) or len(values) != samples:
        summary = f"{len(values)} values" if isinstance(values, list) else brief(values)
        raise RewardError(
            f"{url} answered {summary} as {name!r} of {samples} samples. The reward expects one per sample."
        )
    for n, value in enumerate(values):
        # not math.isfinite(), which raises for an integer that no float can hold
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise RewardError(f"{url} answered {brief(value)} as {name}[{n}]. The reward expects a finite number.")
    return [float(value) for value in values]


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is a number that is not finite")
