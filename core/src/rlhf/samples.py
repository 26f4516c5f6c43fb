"""A few samples of a step as readable text. Loggers show them as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from rlhf.types import Group


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, as text."""

    group: int
    sample: int
    source: str
    prompt: str
    completion: str
    reward: float | None
    rewards: str
    """Each reward source's value: ``math 1, length -0.2``."""
    status: str
    tokens: int
    """Number of tokens that the policy sampled."""
    agent: str = ""
    """The agent, if the policy plays several."""


def first_samples(groups: Sequence[Group], count: int) -> list[Sample]:
    """At most ``count`` samples: the first sample of each group, then the second of each, and so on, so that many
    prompts are shown."""
    ordered = sorted(
        ((position, n, t) for n, g in enumerate(groups) for position, t in enumerate(g.trajectories)),
        key=lambda item: item[:2],
    )
    return [
        Sample(
            group=t.index[0],
            sample=t.index[1],
            source=t.row.source,
            prompt=t.prompt_text,
            completion=t.completion,
            reward=t.reward,
            rewards=", ".join(
                f"{name} {'none' if r.total is None else format(r.total, 'g')}" for name, r in t.rewards.items()
            ),
            status=t.status,
            tokens=t.sampled_tokens,
            agent=t.agent,
        )
        for _, _, t in ordered[:count]
    ]


def sample_table(samples: Sequence[Sample]) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows): the fields of samples. The column ``agent`` is absent if the policy plays a single agent."""
    columns = [f.name for f in fields(Sample) if f.name != "agent" or any(s.agent for s in samples)]
    return columns, [[getattr(s, column) for column in columns] for s in samples]
