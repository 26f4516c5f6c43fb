"""Whether the data has the columns that the rewards declare (``Reward.columns``), and answers can have the texts
(``Reward.texts``).

A source lacks a column where none of its rows has it. No row is read for this. A column that only some rows lack is not
found here: the reward fails when it scores such a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf.errors import PluginError, boundary, did_you_mean, shown
from rlhf.types import Row

from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.sources import Source
from rlhf_runtime.data.tokenizer import special_tokens_in
from rlhf_runtime.rewards.scoring import ActiveReward
from rlhf_runtime.setup.plugins import RunPlugins


def check_columns(plugins_of_run: RunPlugins, data: TrainData, held_out: Sequence[Row], samples: bool) -> None:
    """Refuse a run in which a reward cannot score any row of a source.

    Args:
        held_out: the rows that are evaluated on.
        samples: whether the run samples and scores answers to training rows.

    Raises ConfigError that names each reward, column and source.
    """
    evaluated = {row.source for row in held_out}
    trained = data.sources["train"] if samples else []
    problems = column_problems(plugins_of_run.rewards, trained, "train")
    problems += column_problems(
        plugins_of_run.rewards, [s for s in data.sources["eval"] if s.name in evaluated], "eval"
    )
    refuse(problems)


def refuse(problems: Sequence[str]) -> None:
    """Raises ConfigError if there are problems."""
    raise_problems("the rewards cannot score the data", problems)


def check_texts(rewards: Sequence[ActiveReward], tokenizer: Any) -> None:
    """Refuse rewards that look for special tokens in answers. Raises ConfigError that names reward, text and token."""
    problems = []
    for reward in rewards:
        with boundary(PluginError, f"{reward}: texts()"):
            texts = list(reward.instance.texts())
        problems += [
            f"reward {reward.name!r} looks for {text!r}, which holds the special token {token!r}. The text of an "
            "answer has no special tokens, so no answer would match. Choose other texts, or make the token an "
            'ordinary one: `"special": false` in tokenizer.json and tokenizer_config.json.'
            for text in texts
            for token in special_tokens_in(text, tokenizer)
        ]
    raise_problems("the rewards cannot score answers", problems)


def column_problems(rewards: Sequence[ActiveReward], sources: Sequence[Source], key: str) -> list[str]:
    """A message for each column that a reward declares and a source lacks.

    Args:
        key: ``train`` or ``eval``, for messages.
    """
    return [
        _problem(reward, column, source, sources, key)
        for reward in rewards
        for column in _declared(reward)
        for source in sources
        if (not reward.sources or source.name in reward.sources) and column not in source.columns
    ]


def _declared(reward: ActiveReward) -> list[str]:
    with boundary(PluginError, f"{reward}: columns()"):
        columns = reward.instance.columns()
        names = [] if isinstance(columns, str) else list(columns)
    if isinstance(columns, str) or not all(isinstance(name, str) and name for name in names):
        raise PluginError(f"{reward}: columns() returned {shown(columns)}; allowed: a list or tuple of column names")
    return names


def _problem(reward: ActiveReward, column: str, source: Source, sources: Sequence[Source], key: str) -> str:
    flag = f"--reward.{reward.name}"
    options = [name for name, value in reward.config or () if value == column]
    todo = [f"name the right one with {flag}.{options[0]}" if options else "add it to the data"]
    if any(column in other.columns for other in sources):
        todo.append(f"name the sources that this reward scores with {flag}.sources")
    advice = ", or ".join(todo)
    return (
        f"data.{key} {source.name!r} ({source.section.path}) has no column {column!r}, which reward {reward.name!r} "
        f"reads; columns present: {', '.join(source.columns)}.{did_you_mean(column, source.columns)} "
        f"{advice[0].upper()}{advice[1:]}."
    )
