"""Runs a reward as a run does: in a worker process where it is plain ``def``, with deadline, checks and sums."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from rlhf.interfaces import ReadRole, ScoreWithRole, Tokens
from rlhf.plugins import Plugins
from rlhf.types import Group
from rlhf_runtime.config.flag_values import read
from rlhf_runtime.rewards.scoring import ActiveReward, Scorer


def score_groups(
    ref: str,
    *groups: Group,
    options: dict[str, Any] | None = None,
    deadline: float = 10.0,
    score_with_role: ScoreWithRole | None = None,
    read_role: ReadRole | None = None,
    tokens: Tokens | None = None,
    credit: Literal["outcome", "step"] = "outcome",
    plugins: Plugins | None = None,
) -> None:
    """:func:`score` by one reward.

    Args:
        ref: a reference, as in a run file: a plugin's name or ``file:reward.py``.
        options: the reward's own options, as in a run file.
        deadline: maximum seconds for one group; a plain ``def`` reward is killed afterwards.
        score_with_role, read_role, tokens: replace the run's models and tokenizer, for rewards that declare a role.
        credit: the option ``credit`` of the reward's section.
        plugins: the plugins in which ``ref`` is looked up; None: the installed ones.
    """
    resolved = (plugins or Plugins.discover()).resolve("reward", ref)
    config = resolved.cls.Config.model_validate(read(resolved.cls.Config, {**resolved.options, **(options or {})}))
    active = ActiveReward(resolved.name, resolved, resolved.cls(config), config, deadline=deadline, credit=credit)
    score([active], *groups, score_with_role=score_with_role, read_role=read_role, tokens=tokens, workers=1)


def score(rewards: Sequence[ActiveReward], *groups: Group, trained_on: bool = True, **options: Any) -> None:
    """Fill ``rewards``, ``reward``, ``score``, ``status`` and ``error`` of the groups' trajectories, all groups at the
    same time. ``options``: of the scorer."""

    async def scenario() -> None:
        scorer = Scorer(rewards, **options)
        try:
            await scorer.setup()
            await asyncio.gather(*(scorer.score(group, trained_on) for group in groups))
        finally:
            scorer.close()

    asyncio.run(scenario())
