"""Rewards of an environment's turns at their tokens: the returns of an episode of three turns, by hand."""

from __future__ import annotations

import pytest
import torch
from rlhf.interfaces import Advantage
from rlhf.ops.batch import Batch
from rlhf.ops.sample_values import ENV
from rlhf.ops.trajectories import assemble
from rlhf.types import Group, Image, Row, Trajectory, Turn
from rlhf_algorithms.advantages import (
    GAE,
    RAE,
    GiGPO,
    GroupMean,
    GroupNorm,
    LeaveOneOut,
    Reinforce,
    ReinforceBaseline,
)
from rlhf_algorithms.pipeline import KLPenalty, credit
from rlhf_algorithms.policy_gradient_config import overlong_penalty

ROW = Row({}, "data", 0)


def episode(reward: float, sources: dict[str, float]) -> Batch:
    """Answers of 2, 1 and 2 tokens, which the environment gave 1, -2 and 4; observations of 1 and 2 tokens between."""
    answers = [(2, 1.0), (1, -2.0), (2, 4.0)]
    turns = [Turn([9, 9, 9], False)]
    for number, (length, turn_reward) in enumerate(answers):
        turns.append(Turn([5] * length, True, [-1.0] * length, finish="stop", reward=turn_reward))
        turns += [Turn([7] * (number + 1), False)] if number < 2 else []
    batch = assemble([Group(ROW, 0, [Trajectory(ROW, turns, (0, 0), reward=reward)])], sources)
    assert batch is not None
    return batch


def own(batch: Batch, name: str = "advantages") -> list[float]:
    return batch.tok[name][batch.tok["loss_mask"]].tolist()


def with_columns(batch: Batch, **columns: list[float]) -> Batch:
    """Values at the own tokens, NaN elsewhere: nothing may be read there."""
    for name, values in columns.items():
        column = torch.full((batch.tokens,), float("nan"))
        column[batch.tok["loss_mask"]] = torch.tensor(values)
        batch = batch.with_column("tok", name, column)
    return batch


def reinforce(gamma: float) -> Reinforce:
    return Reinforce(Reinforce.Config(gamma=gamma, normalise="none"))


def test_each_token_is_credited_with_what_came_after_it():
    """With the sum at the end every token gets 3. With each reward at its turn the tokens get 3, 3, 2, 4, 4."""
    at_the_end, _ = credit(episode(3.0, {}), reinforce(1.0))
    assert own(at_the_end) == [3.0] * 5
    batch, metrics = credit(episode(0.0, {ENV: 1.0}), reinforce(1.0))
    assert own(batch) == [3.0, 3.0, 2.0, 4.0, 4.0]
    assert metrics["reward/steps"] == 3.0
    assert metrics["reward/mean"] == 0.0


def test_a_discount_counts_own_tokens_and_no_observation():
    """R = 0, 1, -2, 0, 4 and gamma 0.5, from the end: 4, 2, -1, 0.5, 0.25."""
    batch, _ = credit(episode(0.0, {ENV: 1.0}), reinforce(0.5))
    assert own(batch) == [0.25, 0.5, -1.0, 2.0, 4.0]


def test_with_a_critic():
    """R as above, V = 1, 2, 0, 1, 3, gamma 0.5, lambda 0.5. delta_t = R_t + 0.5 V_{t+1} - V_t:
    0, -1, -1.5, 0.5, 1; A_t = delta_t + 0.25 A_{t+1}, from the end: 1, 0.75, -1.3125, -1.328125, -0.33203125."""
    batch = with_columns(episode(0.0, {ENV: 1.0}), old_values=[1.0, 2.0, 0.0, 1.0, 3.0])
    batch, _ = credit(batch, GAE(GAE.Config(gamma=0.5, lam=0.5, normalise="none")))
    assert own(batch) == [-0.33203125, -1.328125, -1.3125, 0.75, 1.0]
    assert own(batch, "returns") == [0.66796875, 0.671875, -1.3125, 1.75, 4.0]


def test_kl_in_the_reward_shaping_and_clipping_are_beside_them():
    """A source gave 2 for the whole answer. 5 own tokens, punished above 4: -0.5 * 1 / 2. So 1.75 stands at the end,
    which the clip makes 1.5, and each token pays 0.1 * 1 of KL: R = -0.1, 0.9, -2.1, -0.1, 5.4."""
    batch = with_columns(episode(2.0, {ENV: 1.0}), old_logprobs=[-1.0] * 5, ref_logprobs=[-2.0] * 5)
    batch, metrics = credit(
        batch,
        reinforce(1.0),
        kl=KLPenalty(0.1),
        shaper=lambda r_U, b: r_U + overlong_penalty(b.unit["own_tokens"], 6, 2, 0.5),
        reward_clip=(-1.5, 1.5),
    )
    assert own(batch) == pytest.approx([4.0, 4.1, 3.2, 5.3, 5.4])
    assert (metrics["reward/mean"], metrics["reward/shaped"], metrics["reward/steps"]) == (2.0, 1.75, 3.0)


@pytest.mark.parametrize(
    ("estimator", "reads"),
    [
        *((a, True) for a in (GAE, Reinforce)),
        *((a, False) for a in (ReinforceBaseline, LeaveOneOut, GroupNorm, GroupMean, GiGPO)),
    ],
)
def test_which_advantages_support_rewards_at_tokens(estimator, reads):
    """Those without a group baseline: that baseline is over the rewards of whole trajectories."""
    assert estimator().token_rewards is reads


def game(sample: int, observations: list[str], rewards: list[float], total: float) -> Trajectory:
    """Turns of 2 tokens; ``observations`` stand before the turns after the first."""
    turns = [Turn([9, 9], False, text="start")]
    for number, reward in enumerate(rewards):
        turns += [Turn([7], False, text=observations[number - 1])] if number else []
        turns.append(Turn([5, 6], True, [-1.0] * 2, finish="stop", reward=reward))
    return Trajectory(ROW, turns, (3, sample), reward=total)


def test_turns_after_one_observation_share_their_credit():
    """Turns are rewarded 0, 0 and 0, 1; the second game got 2 more from a reward source, at its end. With gamma 0.5 the
    returns are 0, 0 and 1.5, 3, so A^S = -0.75 and 0.75 after "start", and -1.5 and 1.5 after "left". A^E = 0 - 1.5 and
    3 - 1.5. A game of one turn, after "start" too, would change both: it is of another group."""
    other = game(0, [], [8.0], 8.0)
    other.index = (4, 0)
    games = [game(0, ["left"], [0.0, 0.0], 0.0), game(1, ["left"], [0.0, 1.0], 3.0)]
    batch = assemble([Group(ROW, 3, games), Group(ROW, 4, [other])], turns=True)
    assert batch is not None
    batch, _ = credit(batch, GiGPO(GiGPO.Config(gamma=0.5, std="none")))
    assert own(batch) == [-2.25, -2.25, -3.0, -3.0, 2.25, 2.25, 3.0, 3.0, 0.0, 0.0]


def test_kl_before_the_baseline_lowers_the_credit_of_turns_too():
    """The same games. The second pays 4 tokens of KL 0.25, so it gets 2 in all, and 1 at its end besides its turns:
    returns 0, 0 and 1, 2."""
    games = [game(0, ["left"], [0.0, 0.0], 0.0), game(1, ["left"], [0.0, 1.0], 3.0)]
    batch = assemble([Group(ROW, 3, games)], turns=True)
    assert batch is not None
    batch = with_columns(batch, old_logprobs=[-1.0] * 8, ref_logprobs=[-1.0] * 4 + [-1.25] * 4)
    batch, _ = credit(batch, GiGPO(GiGPO.Config(gamma=0.5, std="none")), kl=KLPenalty(1.0, before_baseline=True))
    assert own(batch) == [-1.5, -1.5, -2.0, -2.0, 1.5, 1.5, 2.0, 2.0]


def test_a_reward_of_an_empty_answer_counts_at_the_turn_before_it_and_other_images_are_another_state():
    """The last turn is empty and rewarded 4. Two turns follow the same text, but see another image."""
    games = [game(n, ["look"], [0.0, 1.0], 5.0) for n in range(2)]
    for n, sample in enumerate(games):
        sample.turns[2].images = (Image(bytes([n]), 0, 1, [7]),)
        sample.turns += [Turn([7], False, text="end"), Turn([], True, [], finish="stop", reward=4.0)]
    batch = assemble([Group(ROW, 3, games)], turns=True)
    assert batch is not None
    assert own(batch, "turn_reward") == [0.0, 0.0, 0.0, 5.0] * 2
    assert own(batch, "state") == [0, 0, 1, 1, 0, 0, 3, 3], "2 is that of the empty answer"


def players(sample: int, **rewards: float) -> list[Trajectory]:
    """One token of each agent that has a reward."""

    def turns(agent: str, reward: float) -> list[Turn]:
        return [Turn([9], False, agent=agent), Turn([5], True, [-1.0], reward=reward, agent=agent)]

    return [Trajectory(ROW, turns(a, r), (0, sample), reward=r) for a, r in rewards.items()]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (LeaveOneOut(), [4.0, -1.0, -2.0, 1.0, -2.0]),
        (GroupMean(), [8 / 3, -0.5, -4 / 3, 0.5, -4 / 3]),
        (RAE(RAE.Config(decay=0.5)), [1.5, -1.0, -1.25, 0.0, -0.625]),
    ],
)
def test_each_agent_is_compared_with_itself(advantage: Advantage, expected: list[float]) -> None:
    """Three games; x gets 3, -1 and -1, y gets -2 and -1, because the third game ended before its turn. Means of the
    others: of x -1, 1, 1; of y -1, -2. Running means with decay 0.5: of x 1.5, 0.25, -0.375; of y -1, -1."""
    trajectories = [*players(0, x=3.0, y=-2.0), *players(1, x=-1.0, y=-1.0), *players(2, x=-1.0)]
    batch = assemble([Group(ROW, 0, trajectories)], key=())
    assert batch is not None
    assert own(credit(batch, advantage)[0]) == pytest.approx(expected)
