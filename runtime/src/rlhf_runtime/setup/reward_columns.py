"""Whether the data has the columns that the rewards declare (``Reward.columns``).

A source lacks a column where none of its rows has it. No row is read for this. A column that only some rows lack is not
found here: the reward fails when it scores such a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.errors import PluginError, boundary, did_you_mean, shown
from rlhf.types import Row

from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.sources import Source
from rlhf_runtime.loop.evaluate import ROWS_AT_ONCE
from rlhf_runtime.rewards.scoring import ActiveReward
from rlhf_runtime.setup.plugins import RunPlugins


def check_columns(made: RunPlugins, data: TrainData, held_out: Sequence[Row], samples: bool) -> None:
    """Refuse a run that ends because a reward cannot score the rows of a source. A run that continues without the
    samples that fail is not refused.

    Args:
        held_out: the rows that are evaluated on.
        samples: whether the run samples and scores answers to training rows.

    Raises ConfigError that names each reward, column and source.
    """
    stream, problems = made.config.stream, list[str]()
    if samples:
        sources = data.sources["train"]
        found = column_problems(made.rewards, sources, "train")
        if stream.on_failed_sample == "abort" or len(found) == len(sources):
            problems += [line for lines in found.values() for line in lines]
    found = column_problems(made.rewards, data.sources["eval"], "eval")
    failing: dict[str, None] = {}
    for start in range(0, len(held_out), ROWS_AT_ONCE):
        rows = held_out[start : start + ROWS_AT_ONCE]
        fail = [row.source for row in rows if row.source in found]
        # The share of failures in a short batch after another one is over rows of that one too.
        if len(fail) > stream.max_failed * len(rows) and (not start or len(rows) == ROWS_AT_ONCE):
            failing |= dict.fromkeys(fail)
    problems += [line for source in failing for line in found[source]]
    refuse(problems)


def refuse(problems: Sequence[str]) -> None:
    """Raises ConfigError if there are problems."""
    raise_problems("the rewards cannot score the data", problems)


def column_problems(rewards: Sequence[ActiveReward], sources: Sequence[Source], key: str) -> dict[str, list[str]]:
    """{source: a message for each column that a reward declares and the source lacks}, for the sources that lack any.

    Args:
        key: ``train`` or ``eval``, for messages.
    """
    found: dict[str, list[str]] = {}
    for reward in rewards:
        columns = _declared(reward)
        for source in sources:
            if reward.sources and source.name not in reward.sources:
                continue
            found_here = [_problem(reward, c, source, sources, key) for c in columns if c not in source.columns]
            if found_here:
                found.setdefault(source.name, []).extend(found_here)
    return found


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
