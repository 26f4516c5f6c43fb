"""Tokens that were sampled and are not trained on are counted once, under their cause."""

from __future__ import annotations

import pytest
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf_runtime.config.sections import FilterSection
from rlhf_runtime.samples.acceptance import Acceptance

ROW = Row({}, "s", 0)


def sample(number: int, tokens: int, reward: float | None, failed: bool = False) -> Trajectory:
    turns = [Turn([9, 9], False), Turn([1] * tokens, True, [-1.0] * tokens)]
    return Trajectory(ROW, turns, (0, number), "failed" if failed else "ok", reward=reward, score=reward)


def lost(rules: Acceptance, *samples: Trajectory) -> tuple[dict[str, float], int]:
    """({cause: tokens}, tokens of what is trained on)."""
    counts = rules.new_counts(has_demonstrations=False)
    result, _ = rules.accept(Group(ROW, 0, list(samples)), counts)
    causes = {n.removeprefix("tokens_"): v for n, v in counts.items() if n.startswith("tokens_") and v}
    return causes, sum(t.sampled_tokens for t in result.trajectories) if result is not None else 0


@pytest.mark.parametrize("rules", [{}, {"on_failed_sample": "drop_group"}, {"filter": FilterSection(low=0.9)}])
def test_failed_and_scored_samples_are_counted_in_all_groups(rules) -> None:
    counts = Acceptance(**rules).new_counts(has_demonstrations=False)
    group = [sample(0, 3, 0.0), sample(1, 5, 1.0), sample(2, 4, None), sample(3, 20, None, failed=True)]
    Acceptance(**rules).accept(Group(ROW, 0, group), counts)
    assert (counts["failed_samples"], counts["scored"]) == (1.0, 2.0)


@pytest.mark.parametrize(("spread", "tokens"), [((1.0, 0.0), 4), ((0.5, 0.5), 0)])
def test_the_filter_compares_the_samples_of_one_agent(spread, tokens) -> None:
    """The samples of y are equal and those of x are not, or both are. The two agents' scores differ in any case. Games
    of two agents count once in the smallest size of a group."""
    group = [sample(game, 1, reward) for scores in (spread, (-2.0, -2.0)) for game, reward in enumerate(scores)]
    for trajectory, agent in zip(group, "xxyy", strict=True):
        trajectory.turns[0].agent = agent
    assert lost(Acceptance(FilterSection(min_std=0.0), group_min=2), *group)[1] == tokens
    assert lost(Acceptance(group_min=3), *group)[1] == 0


@pytest.mark.parametrize(
    ("rules", "causes", "trained"),
    [
        ({}, {"failed": 20.0, "unscored": 4.0}, 8),
        ({"on_failed_sample": "drop_group"}, {"failed": 32.0}, 0),
        ({"group_min": 3}, {"failed": 28.0, "unscored": 4.0}, 0),
        ({"filter": FilterSection(low=0.9)}, {"failed": 20.0, "unscored": 4.0, "filtered": 8.0}, 0),
        ({"scored": False}, {"failed": 20.0}, 12),
    ],
)
def test_every_sampled_token_is_trained_on_or_has_one_cause(rules, causes, trained) -> None:
    group = [sample(0, 3, 0.0), sample(1, 5, 1.0), sample(2, 4, None), sample(3, 20, None, failed=True)]
    result = lost(Acceptance(**rules), *group)
    assert result == (causes, trained)
    assert sum(result[0].values()) + result[1] == 32, "prompts and observations are not sampled"
