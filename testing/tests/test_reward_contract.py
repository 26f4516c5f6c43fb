"""The reward suite passes well-made rewards and names the rule that a broken one breaks."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest
from rlhf.interfaces import Reward
from rlhf.types import RewardResult, RoleSpec
from rlhf_testing import awaiting
from rlhf_testing.contract import Nonconformance
from rlhf_testing.reward import RewardContract


class Brevity(Reward):
    """The complete example of the interface."""

    name = "brevity"

    async def score(self, group):
        return [RewardResult(-float(len(t.answer))) for t in group.trajectories]


class Judged(Reward):
    """Plain ``def``, with a role, ``None`` for empty answers, siblings and step rewards."""

    name = "judged"

    def roles(self):
        return (RoleSpec("judge", head="scalar", like="policy"),)

    async def setup(self, context):
        self.ask = context.score_with_role

    async def score(self, group):
        values = await self.ask("judge", [[i for turn in t.turns for i in turn.ids] for t in group.trajectories])
        best = max(values)
        return [
            RewardResult(None if not t.answer else v - best, steps=((1, 0, v),) if t.turns[1].ids else ())
            for t, v in zip(group.trajectories, values, strict=True)
        ]


class TestJudged(RewardContract):
    reward = Judged
    registered = False


class Plain(Reward):
    """Not async."""

    name = "plain"

    def score(self, group):
        return [RewardResult(float(group.row["answer"] in t.answer)) for t in group.trajectories]


class Single(Brevity):
    """Scores one sample per call."""

    per_sample = True

    async def score(self, group):
        [trajectory] = group.trajectories
        return [RewardResult(-float(len(trajectory.answer)))]


class TestSingle(RewardContract):
    reward = Single
    registered = False
    cases = [({}, "four", -4.0), ({}, ("a", ""), (-1.0, 0.0))]


class Teaches(Reward):
    """A log-prob for each sampled token."""

    name = "teaches"
    is_teacher = True

    def steps(self, trajectory):
        sampled = [(n, turn) for n, turn in enumerate(trajectory.turns) if turn.sampled]
        return tuple((n, token, -0.5) for n, turn in sampled for token in range(len(turn.ids)))

    async def score(self, group):
        return [RewardResult(None, steps=self.steps(t)) for t in group.trajectories]


# ------------------------------------------------------------------------------- broken on purpose


class SkipsTokens(Teaches):
    """No log-prob for the last token."""

    def steps(self, trajectory):
        return super().steps(trajectory)[:-1]


class TeachesAndScores(Teaches):
    """A value too."""

    async def score(self, group):
        return [RewardResult(1.0, steps=self.steps(t)) for t in group.trajectories]


class Majority(Brevity):
    """Agreement with the most frequent answer; of equally frequent ones the first counts."""

    async def score(self, group):
        answers = [t.answer for t in group.trajectories]
        return [RewardResult(float(answer == max(answers, key=answers.count))) for answer in answers]


class OneShort(Brevity):
    """One result too few."""

    async def score(self, group):
        return (await super().score(group))[:-1]


class TwoForOne(Single):
    """Two results for one sample."""

    async def score(self, group):
        return 2 * await super().score(group)


class Quits(Brevity):
    """Ends the program."""

    async def score(self, group):
        sys.exit(0)


class NotANumber(Brevity):
    """NaN."""

    async def score(self, group):
        return [RewardResult(float("nan")) for _ in group.trajectories]


class Floats(Brevity):
    """Bare numbers."""

    async def score(self, group):
        return [0.0 for _ in group.trajectories]


class Edits(Brevity):
    """Strips the answers in place."""

    async def score(self, group):
        for trajectory in group.trajectories:
            trajectory.turns[-1].text = trajectory.turns[-1].text[:1]
        return await super().score(group)


class Dice(Brevity):
    """Random."""

    async def score(self, group):
        return [RewardResult(random.random()) for _ in group.trajectories]


class Reversed(Brevity):
    """Results in another order."""

    async def score(self, group):
        return sorted(await super().score(group), key=lambda r: r.value)


class EmptyFails(Brevity):
    """Divides by the answer's length."""

    async def score(self, group):
        return [RewardResult(1.0 / len(t.answer)) for t in group.trajectories]


class StepOnPrompt(Brevity):
    """A step reward where nothing was sampled."""

    async def score(self, group):
        return [RewardResult(0.0, steps=((0, 0, 1.0),)) for _ in group.trajectories]


class Secret(Judged):
    """Uses a role that it does not declare."""

    async def score(self, group):
        await self.ask("teacher", [[1]])
        return await super().score(group)


class Hangs(Brevity):
    """Never returns."""

    async def score(self, group):
        import asyncio

        await asyncio.sleep(60)


class PlainHangs(Brevity):
    """Never returns, and catches every Exception."""

    def score(self, group):
        PlainHangs.called += 1
        while True:
            try:
                time.sleep(60)
            except Exception:
                continue


class Blocks(Brevity):
    """Blocks the event loop."""

    async def score(self, group):
        time.sleep(60)


class Counts(Brevity):
    """Says that it reads texts, and counts tokens."""

    reads = "text"

    async def score(self, group):
        return [RewardResult(float(t.sampled_tokens)) for t in group.trajectories]


class Sees(Brevity):
    reads = "everything"


def suite(cls, **attributes):
    return type("Broken", (RewardContract,), {"reward": cls, "registered": False, **attributes})()


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (OneShort, "test_results", "must return 5 results"),
        (TwoForOne, "test_results", "must return 5 results, one per trajectory, got 2"),
        (Quits, "test_results", r"score calls sys.exit\(\)"),
        (SkipsTokens, "test_results", "the value is None, with 14 steps for 15 sampled tokens"),
        (TeachesAndScores, "test_results", "the value is 1.0, with 1 steps for 1 sampled tokens; a teacher gives no"),
        (NotANumber, "test_results", "value is nan"),
        (Floats, "test_results", "must be a RewardResult"),
        (Edits, "test_leaves_the_group_alone", "changed the group"),
        (Dice, "test_repeatable", "score the same group differently"),
        (Reversed, "test_repeatable", "one result per trajectory, in order"),
        (
            Majority,
            "test_repeatable",
            "do not prefer the first of several samples that are equally good or equally frequent",
        ),
        (StepOnPrompt, "test_results", "which the policy did not sample"),
        (Secret, "test_results", "does not declare"),
        (Counts, "test_reads", "without token ids its scores differ: set reads = 'tokens'"),
        (Sees, "test_reads", "reads is 'everything'; allowed: 'text', 'tokens'"),
    ],
)
def test_broken_reward_fails_the_right_check(cls, check, message):
    with pytest.raises(Nonconformance, match=message):
        getattr(suite(cls), check)()


def test_empty_answer_must_not_raise():
    with pytest.raises(ZeroDivisionError):
        suite(EmptyFails).test_every_answer_alone()


@pytest.mark.parametrize("cls", [Hangs, Blocks])
def test_hanging_reward_is_stopped(cls, monkeypatch):
    monkeypatch.setattr(awaiting, "GRACE", 0.1)
    with pytest.raises(Nonconformance, match=r"score took longer than 0\.1 s"):
        suite(cls, limit=0.1).test_results()


def test_a_plain_reward_that_hangs_is_interrupted_and_waited_for_once(monkeypatch):
    monkeypatch.setattr(awaiting, "GRACE", 0.1)
    PlainHangs.called = 0
    for check in ("test_results", "test_repeatable"):
        with pytest.raises(Nonconformance, match=r"PlainHangs.score took longer than 0\.1 s on fabricated data"):
            getattr(suite(PlainHangs, limit=0.1), check)()
    assert PlainHangs.called == 1


def test_a_timeout_of_the_reward_itself_is_not_called_slow():
    class Unreachable(Brevity):
        async def score(self, group):
            raise TimeoutError("no server")

    with pytest.raises(TimeoutError, match="no server"):
        suite(Unreachable).test_results()


def test_a_case_may_be_a_whole_group():
    group = {}, ["a", "b", "a"]
    suite(Majority, cases=[(*group, [1.0, 0.0, 1.0])]).test_cases()
    with pytest.raises(Nonconformance, match=r"'b' gets 0\.0, expected 1\.0"):
        suite(Majority, cases=[(*group, [1.0, 1.0, 1.0])]).test_cases()


def test_wrong_case_is_noticed():
    with pytest.raises(Nonconformance, match="expected 5"):
        suite(Brevity, cases=[({}, "four", 5.0)]).test_cases()


def test_reward_and_env_suites_import_no_torch():
    code = "import sys, rlhf_testing.reward, rlhf_testing.env, rlhf_testing.rollout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
