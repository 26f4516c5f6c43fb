"""Rejection sampling: conformance, which samples are kept, and that they are trained on as demonstrations."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from rlhf.errors import TrainingError
from rlhf.types import ExpertRecord, Group, RewardResult, Row, RunOptions, Trajectory, Turn
from rlhf_plugin_rejection_sampling import RejectionSampling
from rlhf_testing.algorithm import AlgorithmContract

Config = RejectionSampling.Config


class TestRejectionSampling(AlgorithmContract):
    algorithm = RejectionSampling
    configs = (Config(), Config(keep=2, epochs=2, minibatches=2), Config(keep=2, min_reward=0.3))


def build(run=None, **config):
    return TestRejectionSampling().build(Config(**config), run)


def group(number, rewards, temperature=1.0):
    """Sample s of group g answers with the token 10 g + s, twice."""
    row = Row({}, "rows", number)
    trajectories = []
    for sample, reward in enumerate(rewards):
        token = 10 * number + sample
        turns = [Turn([5, 6], False), Turn([token, token], True, [-1.0, -1.0], temperature=temperature)]
        trajectories.append(Trajectory(row, turns, (number, sample), reward=reward, score=reward))
    return Group(row, number, trajectories)


def first_tokens(batch):
    """The answers' tokens, in order."""
    return batch.ids_N[batch.tok["loss_mask"]].tolist()[::2] if batch is not None else []


@pytest.mark.parametrize(
    ("config", "rewards", "answers", "ties"),
    [
        ({}, [[0.1, 0.7, 0.3], [5.0, 2.0, 4.0]], [1, 10], 0),
        ({"keep": 2}, [[0.1, 0.7, 0.3], [5.0, 2.0, 4.0]], [1, 2, 10, 12], 0),
        ({}, [[0.0, 1.0, 1.0], [2.0, 2.0, 2.0]], [1, 10], 2),  # the first of equals, and of an all-equal group
        ({"keep": 2}, [[0.0, 1.0, 1.0], [2.0, 2.0, 2.0]], [1, 2, 10, 11], 1),
        ({"min_reward": 1.0}, [[0.0, 0.5, 0.9], [0.0, 1.0, 1.0]], [11], 1),
        ({"keep": 3, "min_reward": 0.5}, [[0.0, 0.5, 0.9], [0.0, 1.0, 1.0]], [2, 1, 11, 12], 0),
        ({"min_reward": 9.0}, [[1.0], [2.0]], [], 0),
    ],
)
def test_the_best_are_kept(config, rewards, answers, ties):
    algorithm = build(**config)
    batch, metrics = algorithm.assemble([group(n, r) for n, r in enumerate(rewards)])
    assert first_tokens(batch) == answers
    if batch is None:
        assert metrics == {}
        return
    flat = [r for group in rewards for r in group]
    assert metrics == {
        "reward/mean": pytest.approx(sum(flat) / len(flat)),
        "reward/best": pytest.approx(sum(rewards[a // 10][a % 10] for a in answers) / len(answers)),
        "rejection/kept": len(answers),
        "rejection/empty_groups": sum(not any(a // 10 == n for a in answers) for n in range(len(rewards))),
        "rejection/ties": ties,
    }


def test_ties_do_not_depend_on_the_order_in_which_samples_come():
    samples = group(0, [1.0, 2.0, 2.0, 2.0, 0.0])
    for seed in range(5):
        mixed = list(samples.trajectories)
        random.Random(seed).shuffle(mixed)
        assert first_tokens(build(keep=2).assemble([replace(samples, trajectories=mixed)])[0]) == [1, 2]


def test_samples_without_a_reward_or_a_token_do_not_take_part():
    samples = group(0, [9.0, 8.0, 7.0, 1.0])
    samples.trajectories[0].status = "failed"
    samples.trajectories[1].reward = None
    samples.trajectories[2].turns[1] = Turn([], True, [])
    algorithm = build()
    batch, metrics = algorithm.assemble([samples])
    assert first_tokens(batch) == [3]
    assert metrics["reward/mean"] == 1.0
    samples.trajectories[3].reward = float("nan")
    with pytest.raises(TrainingError, match="its reward is nan"):
        algorithm.assemble([samples])[0]


def test_rewards_of_steps_count():
    """A source with credit = "step" is not in the trajectory's reward; its steps are added, times their weight."""
    samples = group(0, [1.0, 1.0])
    for trajectory, value in zip(samples.trajectories, (0.5, 0.25), strict=True):
        trajectory.rewards["judge"] = RewardResult(None, steps=((1, 0, value), (1, 1, value)))
    algorithm = build(RunOptions(step_sources={"judge": -1.0}), keep=2)
    batch, metrics = algorithm.assemble([samples])
    assert first_tokens(batch) == [1, 0]
    assert metrics["reward/best"] == pytest.approx((1 - 0.5 + 1 - 1) / 2)


def test_kept_samples_become_demonstrations():
    """The tokens that were sampled, under the mask, at temperature 1; the prompt and nothing else before them."""
    batch = build().assemble([group(0, [0.0, 1.0], temperature=0.7)])[0]
    assert batch.ids_N.tolist() == [5, 6, 1, 1]
    assert batch.tok["loss_mask"].tolist() == [False, False, True, True]
    assert set(batch.tok) == {"loss_mask"}, "no temperature: log-probs are those at 1"


def test_kept_samples_keep_their_experts():
    samples = group(0, [0.0, 1.0])
    for number, trajectory in enumerate(samples.trajectories):
        trajectory.turns[1].experts = ExpertRecord(bytes([number] * 3), layers=1, experts=2, chosen=1)
    assert build().assemble([samples])[0].tok["experts"].flatten().tolist() == [1, 1, 1, -1]


def test_needs():
    needs = build(keep=3).needs()
    assert [(r.name, r.trained) for r in needs.roles] == [("policy", True)]
    assert (needs.group_min, needs.generator_logprobs) == (4, False)
    assert build(keep=3, min_reward=0.5).needs().group_min == 3


def test_no_minibatch_is_empty():
    algorithm = build(minibatches=4, epochs=2)
    batch, _ = algorithm.assemble([group(0, [1.0]), group(1, [1.0])])
    assert algorithm.updates(0)[0].minibatches == 4, "what the schedule is planned with"
    (update,) = algorithm.updates(0, batch)
    assert (update.role, update.loss, update.epochs, update.minibatches) == ("policy", "loss", 2, 2)
