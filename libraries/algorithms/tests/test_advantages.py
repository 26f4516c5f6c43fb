"""Every estimator against plain loops, through the conformance suite, and in numbers by hand."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from pydantic import ValidationError
from rlhf_algorithms.advantages import (
    GAE,
    GDPO,
    OPO,
    RAE,
    BatchMean,
    GiGPO,
    GroupMean,
    GroupNorm,
    LeaveOneOut,
    MaxRL,
    PassAtK,
    Reinforce,
    ReinforceBaseline,
    ReMax,
    best_of_k_scores,
)
from rlhf_testing.advantage import AdvantageContract


def loops(R_NA, mask_NA, gamma):
    out = torch.zeros_like(R_NA)
    for n in range(R_NA.shape[0]):
        positions = [t for t in range(R_NA.shape[1]) if mask_NA[n, t]]
        for i, t in enumerate(positions):
            out[n, t] = sum(gamma**k * R_NA[n, s] for k, s in enumerate(positions[i:]))
    return out


def per_trajectory(r_N, group_N, fn):
    return torch.stack([fn(r_N[i], r_N[group_N == group_N[i]]) for i in range(len(r_N))])


class ReturnToGoStatement(AdvantageContract):
    def statement_returns(self, R_NA, mask_NA, values_NA, boot_N, config):
        out = loops(R_NA, mask_NA, config.gamma)
        return out, out


class TestReinforce(ReturnToGoStatement):
    advantage = Reinforce
    configs = (Reinforce.Config(), Reinforce.Config(gamma=0.9, normalise="center"), Reinforce.Config(gamma=0.0))


class TestReinforceBaseline(ReturnToGoStatement):
    advantage = ReinforceBaseline
    configs = (ReinforceBaseline.Config(), ReinforceBaseline.Config(normalise="none"))

    def statement_baseline(self, r_N, group_N, config):
        return per_trajectory(r_N, group_N, lambda r, g: r - g.mean())


class TestRLOO(ReturnToGoStatement):
    advantage = LeaveOneOut

    def statement_baseline(self, r_N, group_N, config):
        return per_trajectory(r_N, group_N, lambda r, g: r - (g.sum() - r) / (len(g) - 1))


class TestGroupNorm(ReturnToGoStatement):
    advantage = GroupNorm
    configs = (GroupNorm.Config(), GroupNorm.Config(std="batch"), GroupNorm.Config(std="none"))

    def statement_baseline(self, r_N, group_N, config):
        def normalise(r, g):
            std = {"group": g.std(), "batch": r_N.std(), "none": torch.tensor(1.0)}[config.std]
            return (r - g.mean()) / (std + (1e-9 if config.std != "none" else 0.0))

        return per_trajectory(r_N, group_N, normalise)


class TestDrGRPO(ReturnToGoStatement):
    advantage = GroupMean

    def statement_baseline(self, r_N, group_N, config):
        return per_trajectory(r_N, group_N, lambda r, g: r - g.mean())


class TestBatchMean(ReturnToGoStatement):
    advantage = BatchMean

    def statement_baseline(self, r_N, group_N, config):
        return torch.stack([r - r_N.mean() for r in r_N])


class TestGDPO(ReturnToGoStatement):
    advantage = GDPO

    def statement_baseline(self, r_N, group_N, config, sources):
        sums = []
        for i, group in enumerate(group_N):
            total = 0.0
            for weight, values_N in sources.values():
                values = [v for v, g in zip(values_N.tolist(), group_N, strict=True) if g == group and v == v]
                if values_N[i] == values_N[i] and statistics.stdev(values) > 0:
                    total += weight * (float(values_N[i]) - statistics.mean(values)) / statistics.stdev(values)
            sums.append(total)
        spread = statistics.stdev(sums)
        return torch.tensor([(s - statistics.mean(sums)) / (spread or 1.0) for s in sums]).double()


class TestMaxRL(ReturnToGoStatement):
    advantage = MaxRL

    def statement_baseline(self, r_N, group_N, config):
        return per_trajectory(r_N, group_N, lambda r, g: (r - g.mean()) / g.mean() if g.mean() > 0 else 0 * r)


class TestOPO(ReturnToGoStatement):
    advantage = OPO

    def statement_baseline(self, r_N, group_N, config, own_tokens_N):
        baselines = {}
        for group in group_N.unique():
            rows = zip(own_tokens_N.tolist(), r_N.tolist(), group_N.tolist(), strict=True)
            samples = [(length, r) for length, r, g in rows if g == group]
            baselines[int(group)] = sum(length * r for length, r in samples) / sum(length for length, _ in samples)
        return torch.stack([r - baselines[int(g)] for r, g in zip(r_N, group_N, strict=True)])


class TestReMax(ReturnToGoStatement):
    advantage = ReMax

    def statement_baseline(self, r_N, group_N, config, greedy_N):
        return torch.tensor([float(r) - float(g) for r, g in zip(r_N, greedy_N, strict=True)]).double()


class TestRAE(ReturnToGoStatement):
    advantage = RAE
    configs = (RAE.Config(), RAE.Config(decay=0.5, by=("player",)), RAE.Config(decay=0.1))

    def statement_baseline(self, r_N, group_N, config, key_N, sample_N):
        """Each trajectory's mean is written as the weighted sum of the rewards of its key, up to its own."""
        place = list(zip(group_N.tolist(), sample_N.tolist(), strict=True))
        credit = []
        for i, key in enumerate(key_N):
            history = sorted(j for j in range(len(r_N)) if key_N[j] == key and place[j] <= place[i])
            history.sort(key=lambda j: place[j], reverse=True)  # the newest first
            mean = sum((1 - config.decay) * config.decay**age * float(r_N[j]) for age, j in enumerate(history))
            credit.append(float(r_N[i]) - mean)
        return torch.tensor(credit).double()


class TestGiGPO(AdvantageContract):
    advantage = GiGPO
    configs = (GiGPO.Config(), GiGPO.Config(std="none"), GiGPO.Config(gamma=0.5, step_weight=2.0))

    def statement_baseline(self, r_N, group_N, config):
        return per_trajectory(r_N, group_N, lambda r, g: (r - g.mean()) / (g.std() if config.std == "group" else 1.0))

    def statement_returns(self, R_NA, mask_NA, values_NA, boot_N, config):
        out = loops(R_NA, mask_NA, 1.0)
        return out, out

    def statement_turns(self, reward_M, state_M, trajectory_M, config):
        turns = list(zip(reward_M.tolist(), trajectory_M.tolist(), strict=True))
        returns = [
            sum(config.gamma**k * r for k, (r, t) in enumerate(turns[i:]) if t == trajectory)
            for i, (_, trajectory) in enumerate(turns)
        ]
        credit = []
        for value, state in zip(returns, state_M.tolist(), strict=True):
            peers = [v for v, s in zip(returns, state_M.tolist(), strict=True) if s == state]
            spread = statistics.stdev(peers) if config.std == "group" and len(peers) > 1 else 1.0
            credit.append(config.step_weight * (value - statistics.mean(peers)) / spread)
        return torch.tensor(credit).double()


def test_turns_in_one_state_are_compared_with_each_other():
    """Two games of two turns. Both begin in state 0; the first goes on to state 1 and wins, the other to state 2. With
    gamma 0.5 the returns in state 0 are 0.5 and 0. States 1 and 2 have one turn each."""
    reward_M = torch.tensor([0.0, 1.0, 0.0, 0.0]).double()
    gigpo = GiGPO(GiGPO.Config(gamma=0.5, std="none"))
    credit_M = gigpo.turn_credit(reward_M, torch.tensor([0, 1, 0, 2]), torch.tensor([0, 0, 1, 1]))
    assert credit_M.tolist() == [0.25, 0.0, -0.25, 0.0]


def test_the_running_mean_is_of_one_player():
    """decay 0.5, from 0. Player 5: rewards 1 and 1, means 0.5 and 0.75. Player 8: -1 and then, in the next step, -1."""
    rae = RAE(RAE.Config(decay=0.5))
    ones, key_N = torch.ones(3).long(), torch.tensor([5, 8, 5])
    r_N = torch.tensor([1.0, -1.0, 1.0]).double()
    assert rae.baseline(r_N, ones, key_N=key_N, sample_N=torch.arange(3)).tolist() == [0.5, -0.5, 0.25]
    rae.update_statistics(r_N, ones, key_N, torch.arange(3))
    assert rae.state_dict() == {"means": {"5": 0.75, "8": -0.5}}
    assert rae.baseline(r_N[1:2], ones[:1], key_N=key_N[1:2], sample_N=ones[:1]).tolist() == [-0.25]


class TestPassAtK(ReturnToGoStatement):
    advantage = PassAtK
    configs = (PassAtK.Config(), PassAtK.Config(k=4), PassAtK.Config(k=3, gamma=0.9))

    def statement_baseline(self, r_N, group_N, config):
        """Over every subset of k answers: the best of all, minus the best without this one."""
        scores = torch.zeros_like(r_N)
        for group in group_N.unique():
            members = (group_N == group).nonzero()[:, 0].tolist()
            subsets = list(itertools.combinations(members, config.k))
            for subset in subsets:
                for i in subset:
                    gain = max(r_N[j] for j in subset) - max(r_N[j] for j in subset if j != i)
                    scores[i] += len(members) * gain / len(subsets)
        return scores


def test_scores_of_right_and_wrong_answers_are_the_gradient_of_pass_at_k():
    """n = 4, two right, k = 2. Of the six pairs a right answer is alone in two, where it adds 1; with the other right
    one it adds 0: 4 * 2 / 6. A wrong one adds nothing. Without a right answer there is no credit."""
    assert best_of_k_scores(torch.tensor([1.0, 0.0, 1.0, 0.0]).double(), 2).tolist() == pytest.approx(
        [4 / 3, 0.0, 4 / 3, 0.0]
    )
    assert best_of_k_scores(torch.zeros(4).double(), 3).tolist() == [0.0] * 4
    assert best_of_k_scores(torch.tensor([0.0, 1.0]).double(), 3).tolist() == [0.0, 0.0], "an incomplete group"
    one_right = torch.zeros(1100, dtype=torch.float64).index_fill_(0, torch.tensor(7), 1.0)
    assert torch.equal(best_of_k_scores(one_right, 550).round(decimals=9), 550 * one_right), "beyond the largest float"
    assert PassAtK(PassAtK.Config(k=5)).group_min == 5


class TestGAE(AdvantageContract):
    advantage = GAE
    configs = (GAE.Config(), GAE.Config(gamma=0.9, lam=0.8), GAE.Config(lam=0.0))

    def statement_returns(self, R_NA, mask_NA, values_NA, boot_N, config):
        A, V = torch.zeros_like(R_NA), values_NA
        for n in range(R_NA.shape[0]):
            T = int(mask_NA[n].sum())
            end = boot_N[n] if boot_N is not None else torch.tensor(0.0).double()
            nxt = [*V[n, 1:T], end]
            delta = [R_NA[n, t] + config.gamma * nxt[t] - V[n, t] for t in range(T)]
            for t in range(T):
                A[n, t] = sum((config.gamma * config.lam) ** (k - t) * delta[k] for k in range(t, T))
        return A, A + V * mask_NA


def test_std_option_is_not_ignored():
    """Group normalisation ignored the switch that turns the division by std off."""
    r_N, group_N = torch.tensor([0.0, 1.0, 1.0, 3.0, 0.0, 10.0]).double(), torch.tensor([0, 0, 0, 0, 1, 1])
    by_group = GroupNorm().baseline(r_N, group_N)
    assert by_group.tolist() == pytest.approx(
        [-0.99339927, -0.19867985, -0.19867985, 1.39075897, -0.70710678, 0.70710678]
    )
    none = GroupNorm(GroupNorm.Config(std="none")).baseline(r_N, group_N)
    assert none.tolist() == [-1.25, -0.25, -0.25, 1.75, -5.0, 5.0]
    batch = GroupNorm(GroupNorm.Config(std="batch")).baseline(r_N, group_N)
    assert (none / batch).tolist() == pytest.approx([3.83405789] * 6)


def test_by_hand():
    r_N, group_N = torch.tensor([1.0, 0.0, 0.0, 5.0, 3.0]).double(), torch.tensor([7, 7, 7, 2, 2])
    assert LeaveOneOut().baseline(r_N, group_N).tolist() == pytest.approx([1.0, -0.5, -0.5, 2.0, -2.0])
    assert GroupMean().baseline(r_N, group_N).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1.0, -1.0])


def test_no_option_is_accepted_that_does_nothing():
    with pytest.raises(ValidationError, match="no_std_norm"):
        GroupNorm.Config(no_std_norm=True)
    with pytest.raises(ValidationError, match="normalise"):
        LeaveOneOut.Config(normalise="whiten")
