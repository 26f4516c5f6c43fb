"""A rollout has answers scored by the run's rewards, and may give its sample the reward itself."""

from dataclasses import replace

import pytest
from rlhf.interfaces import Rollout
from rlhf.types import Row, Sampling, Turn
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.rewards.scoring import ActiveReward, Scorer
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Rollouts
from rlhf_runtime.samples.sample_context import SampleParts

REWARD = """
async def score(prompt, completion, row):
    if completion == "broken":
        raise ValueError("no such answer")
    return None if row["right"] is None else float(completion == row["right"])
"""


TEACHER = """
from rlhf.interfaces import Reward
from rlhf.types import RewardResult

class Teacher(Reward):
    is_teacher = True

    async def score(self, group):
        return [RewardResult(None, steps=((1, 0, -0.5), (2, 0, -1.5))) for _ in group.trajectories]
"""


STEPS = """
from rlhf.interfaces import Reward
from rlhf.types import RewardResult

class Steps(Reward):
    async def score(self, group):
        return [RewardResult(0.25, steps=((1, 0, 0.5),)) for _ in group.trajectories]
"""
STATUS = """
from rlhf.interfaces import Reward
from rlhf.types import RewardResult

class Status(Reward):
    async def score(self, group):
        return [RewardResult(float(t.status == "truncated")) for t in group.trajectories]
"""
SLOW = """
import asyncio

async def score(prompt, completion, row):
    await asyncio.sleep(0.3)
    return 1.0
"""


class Letters:
    """Answers with the next letter: "a" after a prompt, "b" after "a"."""

    def generate(self, requests):
        for position, request in enumerate(requests):
            letter = chr(max(96, request.ids[-1]) + 1)
            yield position, Turn([ord(letter)], sampled=True, logprobs=[0.0], finish="length", text=letter)


class Template:
    def encode_prompt(self, row):
        return Turn([61], sampled=False, text="=")


class Letterwise(Rollout):
    """Two turns; the reward of each is what the answer gains by it, times 10."""

    name = "letterwise"
    rewards = True
    answer = None

    async def run(self, row, seed, ctx):
        turns = [ctx.encode_prompt(row)]
        value = 0.0
        for number in range(2):
            turn = await ctx.generate(turns, ctx.sampling, number)
            turns.append(turn)
            answers = [turns, [turns[0], replace(turn, text=self.answer or "ab")]]
            score, other = await ctx.score(row, answers)
            ctx.report("other", other)
            if self.rewards:
                turn.reward, value = 10 * (score - value), score
        return turns


class Single(Rollout):
    """One turn, with the reward that the run gives to it."""

    name = "single"

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_prompt(row)
        turn = await ctx.generate([prompt], ctx.sampling)
        [turn.reward] = await ctx.score(row, [[prompt, turn]])
        return [prompt, turn]


@pytest.fixture
def play(from_file):
    def run(rollout=None, right="ab", weights=(1.0,), teacher=False, text=REWARD, deadline=20.0, **section):
        reward = from_file("reward", text)
        sections = [ActiveReward(f"r{n}", reward, reward.cls(), weight=w, **section) for n, w in enumerate(weights)]
        if teacher:
            source = from_file("reward", TEACHER)
            sections.append(ActiveReward("teacher", source, source.cls()))
        scorer = Scorer(sections, workers=1)
        main = MainThread()
        try:
            main.run(scorer.setup())
            rollouts = Rollouts(SampleParts(rollout or Letterwise(), Template(), scorer), Letters(), main)
            sampling = Sampling(max_new_tokens=1)
            settings = RolloutSettings(sampling, 1, "sample", 0, 100, deadline, abort_on_failure=False)
            [group] = rollouts.run([Row({"right": right}, "unit", 0)], 0, settings)
            return group.trajectories[0]
        finally:
            scorer.close()
            main.close()

    return run


def test_answers_are_scored_by_every_section_and_the_sample_is_not_scored_again(play):
    """The answer in two turns is one text; the reward of its first turn does not count in the score of both."""
    sample = play(weights=(1.0, 2.0))
    assert [turn.reward for turn in sample.turns[1:]] == [0.0, 30.0]
    assert (sample.status, sample.reward, sample.rewards) == ("truncated", 30.0, {})
    assert sample.info == {"rollout/other": 3.0}
    assert play(right="a").reward == 0.0, "10 for the first turn and -10 for the second"


def test_a_teacher_reads_a_sample_that_has_its_reward_by_the_rollout(play):
    sample = play(teacher=True)
    assert sample.reward == 10.0
    assert [value for _, _, value in sample.rewards["teacher"].steps] == [-0.5, -1.5]


def test_a_rollout_that_sets_no_reward_leaves_the_sample_to_the_run(play):
    rollout = Letterwise()
    rollout.rewards = False
    sample = play(rollout)
    assert (sample.reward, sample.rewards["r0"].value) == (1.0, 1.0)


@pytest.mark.parametrize("credit", ["outcome", "step"])
def test_steps_count_in_the_reward_of_an_answer_whatever_their_credit(play, credit):
    """No batch places them at their tokens, because the run does not score the sample again."""
    assert play(Single(), text=STEPS, credit=credit).reward == 0.75


def test_a_reward_reads_of_an_answer_that_it_is_truncated(play):
    assert play(Single(), text=STATUS).reward == 1.0


def test_waiting_for_rewards_does_not_count_towards_the_deadline_of_the_rollout(play):
    """Each call has its own deadline. Waiting for a free one would fail the last samples of a large batch."""
    sample = play(Single(), text=SLOW, deadline=0.15)
    assert (sample.error, sample.reward) == ("", 1.0)


@pytest.mark.parametrize(
    ("changes", "answer", "message"),
    [
        ({"weights": ()}, None, "the run has no [[reward]]; set --reward NAME"),
        ({"right": None}, None, "answer 0 that the rollout scores has no reward: no [[reward]] applies to it"),
        ({}, "broken", "answer 1 that the rollout scores has no reward: reward 'r0' (file): score() raised"),
    ],
)
def test_answers_without_a_reward_fail_the_sample(play, changes, answer, message):
    rollout = Letterwise()
    rollout.answer = answer
    sample = play(rollout, **changes)
    assert (sample.status, sample.reward) == ("failed", None)
    assert message in sample.error
