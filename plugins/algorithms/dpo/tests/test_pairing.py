"""Samples become pairs: the choice of pairs, samples without a pair, and the layout of the batch of pairs."""

from __future__ import annotations

import itertools

import pytest
from rlhf.types import ExpertRecord, Group, RewardResult, Row, RunOptions, Trajectory, Turn
from rlhf_plugin_dpo import DPOLoss, OnlineDPO


def group(rewards, answers=None, number=0, **fields):
    """A group whose sample n answers ``[10 + n, 0]`` unless ``answers`` says otherwise; prompt ``[1, 2]``."""
    trajectories = []
    for n, reward in enumerate(rewards):
        ids = list(answers[n]) if answers else [10 + n, 0]
        turns = [Turn([1, 2], sampled=False), Turn(ids, True, finish="stop", temperature=0.5)]
        trajectories.append(Trajectory(ROW, turns, (number, n), reward=reward, **fields))
    return Group(ROW, number, trajectories)


ROW = Row({}, "data", 0)


def algorithm(run=None, **options):
    return OnlineDPO(OnlineDPO.Config(**options), {"loss": DPOLoss()}, run)


def answers(batch):
    """[(chosen ids, rejected ids), ...] of the trained tokens."""
    mask, pairs = batch.tok["loss_mask"], []
    for unit in range(batch.units):
        sides = []
        for role in (0, 1):
            tokens = (batch.unit_N == unit) & (batch.role_B[batch.seq_N] == role) & mask
            sides.append(batch.ids_N[tokens].tolist())
        pairs.append(tuple(sides))
    return pairs


def test_the_best_and_the_worst():
    online_dpo = algorithm()
    batch, metrics = online_dpo.assemble([group([0.1, 0.9, -1.0, 0.5]), group([1.0, 0.0], number=1)])
    assert answers(batch) == [([11, 0], [12, 0]), ([10, 0], [11, 0])]
    assert batch.unit["chosen_score"].tolist() == [0.9, 1.0]
    assert batch.unit["rejected_score"].tolist() == [-1.0, 0.0]
    assert batch.tok["temperature"][batch.tok["loss_mask"]].unique().tolist() == [0.5]
    assert set(batch.tok) == {"loss_mask", "temperature"}
    assert metrics == {
        "pairs/made": 2.0,
        "pairs/groups": 2.0,
        "pairs/tied_groups": 0.0,
        "pairs/equal_answers": 0.0,
        "pairs/chosen_score": pytest.approx(0.95),
        "pairs/rejected_score": pytest.approx(-0.5),
    }


def test_pairs_keep_the_experts_of_their_samples():
    samples = group([0.0, 1.0])
    for number, trajectory in enumerate(samples.trajectories):
        trajectory.turns[1].experts = ExpertRecord(bytes([number] * 3), layers=1, experts=2, chosen=1)
    batch, _ = algorithm().assemble([samples])
    assert batch.tok["experts"].flatten().tolist() == [1, 1, 1, -1, 0, 0, 0, -1]


def test_the_first_of_several_equals_in_any_order():
    """Most rewards are 0 or 1, so several samples are the best. The sample number decides, not the order of arrival."""
    rewards = [0.0, 1.0, 1.0, 0.0]
    samples = group(rewards).trajectories
    for order in itertools.permutations(samples):
        assert answers(algorithm().assemble([Group(ROW, 0, list(order))])[0]) == [([11, 0], [10, 0])]


def test_ties_and_equal_answers_give_no_pair_and_are_counted():
    online_dpo = algorithm()
    duplicates = [[7, 0], [7, 0]]
    groups = [group([1.0, 1.0]), group([1.0, 0.0], duplicates, 1), group([3.0], number=2), group([2.0, 1.0], number=3)]
    batch, metrics = online_dpo.assemble(groups)
    assert answers(batch) == [([10, 0], [11, 0])]
    assert (metrics["pairs/groups"], metrics["pairs/tied_groups"], metrics["pairs/equal_answers"]) == (4.0, 2.0, 1.0)
    assert algorithm().assemble([group([1.0, 1.0]), group([0.0, 0.0], number=1)]) == (None, {})
    assert algorithm().assemble([group([1.0, 0.0], duplicates)]) == (None, {})


def test_a_gap():
    assert algorithm(min_gap=0.5).assemble([group([1.0, 0.5])]) == (None, {})
    assert algorithm(min_gap=0.4).assemble([group([1.0, 0.5])])[0].units == 1


def test_all_that_differ():
    batch = algorithm(pairs="all").assemble([group([1.0, 0.0, 1.0]), group([2.0, 1.0, 0.0], number=1)])[0]
    assert answers(batch)[:2] == [([10, 0], [11, 0]), ([12, 0], [11, 0])]
    assert answers(batch)[2:] == [([10, 0], [11, 0]), ([10, 0], [12, 0]), ([11, 0], [12, 0])]
    gapped = algorithm(pairs="all", min_gap=1.0).assemble([group([2.0, 1.0, 0.0])])[0]
    assert answers(gapped) == [([10, 0], [12, 0])]


def test_samples_without_reward_or_tokens_are_in_no_pair():
    mixed = group([5.0, 1.0, 0.0, -5.0])
    mixed.trajectories[0].reward = None
    mixed.trajectories[3].turns[1].ids = []
    assert answers(algorithm().assemble([mixed])[0]) == [([11, 0], [12, 0])]


def test_a_group_without_any_answer_gives_no_pair():
    silent = group([1.0, 0.0], answers=[[], []])
    online_dpo = algorithm()
    batch, metrics = online_dpo.assemble([silent, group([0.0, 1.0], number=1)])
    assert answers(batch) == [([11, 0], [10, 0])]
    assert (metrics["pairs/made"], metrics["pairs/groups"], metrics["pairs/tied_groups"]) == (1.0, 2.0, 1.0)


def test_step_rewards_count():
    """A source with credit by step is not in the trajectory's reward; a pair is of the whole."""
    steps = group([0.0, 0.0])
    steps.trajectories[1].rewards["prm"] = RewardResult(None, steps=((1, 0, 1.0), (1, 1, 2.0)))
    online_dpo = algorithm(RunOptions(step_sources={"prm": 0.5}))
    batch = online_dpo.assemble([steps])[0]
    assert answers(batch) == [([11, 0], [10, 0])]
    assert batch.unit["chosen_score"].tolist() == [1.5]


def test_the_sequences_of_a_rewritten_context_are_one_answer():
    """A side may be several sequences: its log-prob is the sum over all of them."""
    turns = [Turn([1, 2], False), Turn([10, 11], True), Turn([3], False, fresh=True), Turn([12], True)]
    long = Trajectory(ROW, turns, (0, 0), reward=1.0)
    batch = algorithm().assemble([Group(ROW, 0, [long, group([9, 0.0]).trajectories[1]])])[0]
    assert batch.role_B.tolist() == [0, 0, 1]
    assert (batch.units, batch.answers) == (1, 2)
    assert answers(batch) == [([10, 11, 12], [11, 0])]


def test_no_more_minibatches_than_pairs():
    online_dpo = algorithm(minibatches=4, epochs=2)
    batch, _ = online_dpo.assemble([group([1.0, 0.0]), group([1.0, 0.0], number=1), group([0.0, 0.0], number=2)])
    assert (online_dpo.updates(0, batch)[0].minibatches, online_dpo.updates(0, batch)[0].epochs) == (2, 2)
    assert online_dpo.updates(0)[0].minibatches == 4, "what the schedule is planned with"
