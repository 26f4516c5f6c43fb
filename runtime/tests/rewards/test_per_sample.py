"""Reward functions of one sample: those of a group run together, each call has its deadline, and each fails alone."""

from __future__ import annotations

import sys

import pytest
from rlhf_runtime.rewards.scoring import ActiveReward

from tests.support import scoring

ASYNC = """
import asyncio
running, most, calls = 0, 0, []

async def score(prompt, completion, row):
    global running, most
    calls.append(completion)
    running += 1
    most = max(most, running)
    try:
        if completion == "hangs":
            await asyncio.sleep(600)
        elif completion == "raises":
            raise ConnectionError("the judge is down")
        else:
            await asyncio.sleep(0.05)
    finally:
        running -= 1
    return float(most)
"""
PLAIN = """
import os, time
def score(prompt, completion, row):
    if completion == "hangs":
        time.sleep(600)
    if completion == "raises":
        raise ConnectionError("the judge is down")
    time.sleep(0.2)
    return 1.0
"""


def score(resolved, *groups, workers: int = 2, **options) -> None:
    scoring.score([ActiveReward("judge", resolved, resolved.cls(None), **options)], *groups, workers=workers)


@pytest.mark.parametrize("text", [ASYNC, PLAIN], ids=["async", "plain"])
def test_each_call_has_a_deadline_and_fails_alone(from_file, make_group, text: str) -> None:
    group = make_group("a", "hangs", "raises", "d")
    score(from_file("reward", text), group, deadline=1.0)
    assert [t.status for t in group.trajectories] == ["ok", "failed", "failed", "ok"]
    hangs, raises = (t.error for t in group.trajectories[1:3])
    assert "score() took longer than its deadline of 1 s" in hangs
    assert hangs.endswith("in its section.")
    assert "raised ConnectionError: the judge is down" in raises
    assert "row 7" not in hangs + raises, "the message about a failed sample names it"


def test_the_deadline_is_a_calls_and_not_that_of_all_samples(from_file, make_group) -> None:
    """Six calls of 0.2 s, one after the other in one process, are more than a deadline of 1 s."""
    group = make_group(*"abcdef")
    score(from_file("reward", PLAIN), group, workers=1, deadline=1.0)
    assert [t.error for t in group.trajectories] == [""] * 6


def test_only_what_failed_is_asked_again(from_file, make_group) -> None:
    resolved = from_file("reward", ASYNC)
    group = make_group("a", "raises", "c")
    score(resolved, group, retries=2)
    assert sorted(sys.modules[resolved.cls.__module__].calls) == ["a", "c", "raises", "raises", "raises"]
    assert group.trajectories[1].error.endswith("(attempt 3 of 3)")


@pytest.mark.parametrize(("concurrency", "limit"), [(3, 3.0), (None, 64.0), (200, 100.0)])
def test_calls_at_once_are_limited_and_waiting_counts_for_no_deadline(
    from_file, make_group, concurrency: int | None, limit: float
) -> None:
    groups = [make_group(*map(str, range(10))) for _ in range(10)]
    score(from_file("reward", ASYNC), *groups, concurrency=concurrency, deadline=1.0)  # 100 calls, by threes 1.7 s
    assert [t.error for g in groups for t in g.trajectories] == [""] * 100
    assert max(t.reward for g in groups for t in g.trajectories) == limit


@pytest.mark.parametrize(("concurrency", "limit"), [(None, 2.0), (3, 3.0)])
def test_a_reward_may_name_its_own_default(
    from_file, make_group, monkeypatch, concurrency: int | None, limit: float
) -> None:
    resolved = from_file("reward", ASYNC)
    monkeypatch.setattr(resolved.cls, "concurrency", 2)
    group = make_group(*"abcdefgh")
    score(resolved, group, concurrency=concurrency, deadline=20.0)
    assert max(t.reward for t in group.trajectories) == limit


def test_concurrency_of_a_plain_reward_is_its_processes(from_file, make_group) -> None:
    text = "import os, time\ndef score(prompt, completion, row):\n    time.sleep(0.1)\n    return float(os.getpid())\n"
    group = make_group(*"abcdefgh")
    score(from_file("reward", text), group, workers=1, concurrency=3, deadline=20.0)
    assert len({t.reward for t in group.trajectories}) == 3
