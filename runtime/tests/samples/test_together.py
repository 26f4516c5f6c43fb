"""Rollouts, environments and rewards together: real processes and deadlines, and a generator without a model."""

from __future__ import annotations

import pytest
from rlhf.errors import RolloutError
from rlhf.plugins import Plugins
from rlhf.types import Row, Sampling, Turn
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.config.sections import EnvSection
from rlhf_runtime.rewards.scoring import ActiveReward, Scorer
from rlhf_runtime.samples.episodes import Episodes
from rlhf_runtime.samples.failures import Failures
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Rollouts
from rlhf_runtime.samples.sample_context import SampleParts

ENV = """
from rlhf.interfaces import Env
from rlhf.types import EnvStep

class Counting(Env):
    def reset(self, row, seed):
        self.row, self.count = row, 0
        return ""

    def step(self, action):
        self.count += 1
        while self.row["act"] == "hang" and self.count == 2:
            pass
        if self.row["act"] == "raise":
            raise ValueError("no such move")
        return EnvStep(str(self.count), 0.5, done=self.count == 3)
"""

REWARD = """
def score(prompt, completion, row):
    while row["act"] == "slow reward":
        pass
    return float("nan") if row["act"] == "nan" else 1.0
"""


ASYNC = """
import asyncio
from rlhf.interfaces import Env
from rlhf.types import EnvStep

class Crowded(Env):
    now = most = 0

    async def reset(self, row, seed):
        Crowded.now += 1
        Crowded.most = max(Crowded.most, Crowded.now)
        return ""

    async def step(self, action):
        await asyncio.sleep(0)
        return EnvStep("?", float(Crowded.most), done=True)

    async def close(self):
        Crowded.now -= 1
"""


class Characters:
    """One token per character; every answer ends with a dot."""

    end_token_ids = (46,)

    def encode_prompt(self, row):
        return self.encode(row["prompt"])

    def encode_opening(self, row, text):
        return [self.encode_prompt(row), self.encode(text)]

    @property
    def observations(self):
        return self

    def encode(self, text, closed=True, images=()):
        assert closed
        return Turn([ord(c) for c in text], sampled=False, text=text)


class Dots:
    """Answers every request with one dot."""

    def generate(self, requests):
        for position, _ in enumerate(requests):
            yield position, Turn([46], sampled=True, logprobs=[0.0], finish="stop", text=".")


@pytest.fixture
def play(from_file):
    def run(
        *acts: str,
        samples: int = 3,
        abort: bool = False,
        concurrency: int = 2,
        text: str = ENV,
        reward: str = REWARD,
        failures: Failures | None = None,
    ):
        env, reward = from_file("env", text), from_file("reward", reward)
        episodes = Episodes(env, None, EnvSection(use="x", concurrency=concurrency, deadline=1.0, max_turns=5))
        scorer = Scorer([ActiveReward("r", reward, reward.cls(), deadline=1.0)], workers=1)
        rollout = Plugins.discover().resolve("rollout", "multi_turn").cls()
        main = MainThread()
        try:
            main.run(scorer.setup())
            rollouts = Rollouts(SampleParts(rollout, Characters(), scorer, episodes), Dots(), main)
            settings = RolloutSettings(
                Sampling(max_new_tokens=4), samples, "sample", 0, 100, 20.0, abort, failures=failures
            )
            rows = [Row({"prompt": "p", "act": act}, "unit", i) for i, act in enumerate(acts)]
            return rollouts.run(rows, 0, settings)
        finally:
            episodes.close()
            scorer.close()
            main.close()

    return run


def test_episodes_of_an_async_environment_are_limited_too(play) -> None:
    groups = play(*["ok"] * 4, samples=3, concurrency=5, text=ASYNC)
    peaks = [t.turns[-1].reward for g in groups for t in g.trajectories]
    assert max(peaks) == 5
    assert len(peaks) == 12


FAILURES = {
    "raise": "EnvError: env 'env_0' (file): step() raised ValueError: no such move",
    "hang": "step() took longer than its deadline of 1 s; its worker process was killed",
    "nan": "RewardError: reward 'r' (file): score() raised RewardError: reward function 'score'",
    "slow reward": "RewardError: reward 'r' (file): score() took longer than its deadline of 1 s",
}


def test_a_failure_fails_no_other_sample(play) -> None:
    """In two worker processes, to which five samples come in turn."""
    *bad, good = (group.trajectories[0] for group in play(*FAILURES, "ok", samples=1))
    assert ("".join(turn.text for turn in good.turns), good.reward, good.index) == ("p.1.2.", 2.5, (4, 0))
    assert [(sample.status, sample.reward) for sample in bad] == [("failed", None)] * 4
    for sample, message in zip(bad, FAILURES.values(), strict=True):
        assert message in sample.error


@pytest.mark.parametrize("act", ["raise", "nan"])
def test_a_failure_may_end_the_run(play, act: str) -> None:
    with pytest.raises(RolloutError, match=r"(?s)row 1 of 'unit' failed: .*on_failed_sample"):
        play("ok", act, samples=1, abort=True)


GAME = """
from rlhf.interfaces import Env
from rlhf.types import EnvStep

class Seats(Env):
    @classmethod
    def agents(cls, config):
        return ("b", "a")

    def reset(self, row, seed):
        self.row, self.count = row, 0
        return EnvStep("0", agent="a")

    def step(self, action):
        self.count += 1
        if self.row["act"] == "raise" and self.count == 2:
            raise ValueError("no such move")
        if self.count == 3 or self.row["act"] == "short":
            return EnvStep(done=True, rewards={"a": 1.0, "b": -1.0})
        return EnvStep(str(self.count), 0.5, agent="ab"[self.count % 2])
"""
NAMES = """
from rlhf.interfaces import Reward
from rlhf.types import RewardResult

class Names(Reward):
    def score(self, group):
        return [RewardResult(10.0 * len({t.agent for t in group.trajectories})) for _ in group.trajectories]
"""


def test_each_agent_of_a_game_has_a_trajectory_and_the_reward_sees_one_agent(play) -> None:
    """In worker processes. A game that ends before the turn of b has none of b; one that fails is one failed sample."""
    failures = Failures(0.5, lambda note: None)
    full, short, failed = play("ok", "short", "raise", samples=2, text=GAME, reward=NAMES, failures=failures)
    assert [(t.agent, t.index, t.reward, "".join(u.text for u in t.turns)) for t in full.trajectories] == [
        ("b", (0, 0), 10.0 - 0.5, "p1."),
        ("a", (0, 0), 10.0 + 1.5, "p0.2."),
        ("b", (0, 1), 10.0 - 0.5, "p1."),
        ("a", (0, 1), 10.0 + 1.5, "p0.2."),
    ]
    assert [(t.agent, t.reward) for t in short.trajectories] == [("a", 11.0)] * 2
    assert [(t.agent, t.status, t.reward, t.sampled_tokens) for t in failed.trajectories] == [
        ("", "failed", None, 2)
    ] * 2
    assert (failures.sample_count, failures.failed) == (6, 2), "games"
