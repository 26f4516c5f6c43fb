"""Refusals of rows that the rewards, the loss or the algorithm cannot use. Few rows are read for them, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import ConfigError, PluginError, boundary, did_you_mean, shown
from rlhf.interfaces import Algorithm
from rlhf.types import Row

from rlhf_runtime.checks.run import RunPlugins
from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.sources import Source
from rlhf_runtime.data.tokenizer import special_tokens_in
from rlhf_runtime.models.assemble import assemble
from rlhf_runtime.rewards.scoring import ActiveReward


def check_columns(plugins_of_run: RunPlugins, data: TrainData, held_out: Sequence[Row], samples: bool) -> None:
    """Refuse a run in which a reward cannot score any row of a source, because a column is missing that the reward
    declares (``Reward.columns``).

    A source lacks a column where none of its rows has it. No row is read for this. A column that only some rows lack is
    not found here: the reward fails when it scores such a row.

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
    """Refuse rewards that look for special tokens in answers (``Reward.texts``). Raises ConfigError that names reward,
    text and token."""
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
        _problem(reward, column, option, source, sources, key)
        for reward in rewards
        for column, option in _declared(reward).items()
        for source in sources
        if (not reward.sources or source.name in reward.sources) and not source.has(column)
    ]


def _declared(reward: ActiveReward) -> dict[str, str]:
    """{column: option that names it, or an empty text}."""
    with boundary(PluginError, f"{reward}: columns()"):
        columns = reward.instance.columns()
        names = [] if isinstance(columns, str) else list(columns)
    if isinstance(columns, str) or not all(isinstance(name, str) and name for name in names):
        raise PluginError(f"{reward}: columns() returned {shown(columns)}; allowed: a list or tuple of column names")
    if isinstance(columns, Mapping):
        return {name: str(columns[name]) for name in names}
    return {name: next((n for n, value in reward.config or () if value == name), "") for name in names}


def _problem(
    reward: ActiveReward, column: str, option: str, source: Source, sources: Sequence[Source], key: str
) -> str:
    flag = f"--reward.{reward.name}"
    todo = [f"name the right one with {flag}.{option}" if option else "add it to the data"]
    if any(other.has(column) for other in sources):
        todo.append(f"name the sources that this reward scores with {flag}.sources")
    advice = ", or ".join(todo)
    return (
        f"data.{key} {source.name!r} ({source.section.path}) has no column {column!r}, which reward {reward.name!r} "
        f"reads; columns present: {', '.join(source.columns)}.{did_you_mean(column, source.columns)} "
        f"{advice[0].upper()}{advice[1:]}."
    )


def check_margins(algorithm: Algorithm, data: TrainData) -> None:
    """Raises ConfigError where the loss reads margins and the algorithm does not put them into the batch. This happens
    only where the algorithm builds units from rows by itself."""
    rows = next(data.every_example(max(2, algorithm.needs().rows_min)), [])
    batch = assemble(algorithm, rows)[0] if rows else None
    if batch is not None and not batch.has("margin"):
        raise ConfigError(
            f"data.margin = {data.section.margin!r}: the loss reads the column 'margin', and assemble() of "
            f"{algorithm.name} does not create it. Remove data.margin. The author of the algorithm can use "
            'rlhf.ops.rows.pack_rows, or add Example.values["margin"] as a unit column.'
        )


def check_eval_rows(algorithm: Algorithm, rows: int) -> None:
    """Raises ConfigError where the loss cannot be evaluated on so few rows."""
    least = algorithm.needs().rows_min
    if 0 < rows < least:
        raise ConfigError(
            f"{algorithm.name} needs at least {least} rows to evaluate on, got {rows} from data.eval. Add rows, or "
            "leave data.eval out."
        )
