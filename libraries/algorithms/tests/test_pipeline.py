"""The order from reward to advantage, stage by stage and as a whole."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import Advantage
from rlhf.ops.groups import group_center
from rlhf.ops.returns import gae, return_to_go
from rlhf.ops.trajectories import assemble
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf_algorithms import pipeline
from rlhf_algorithms.pipeline import KLPenalty, credit
from rlhf_testing import fabricate

ROW = Row({}, "data", 0)


class Centered(Advantage):
    name = "centered"
    how = "none"

    @property
    def normalise(self):
        return self.how

    def baseline(self, r_N, group_N):
        return group_center(r_N, group_N)

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        G_NA = return_to_go(R_NA, mask_NA, 1.0)
        return G_NA, G_NA


class Whitened(Centered):
    how = "whiten"


class Critic(Centered):
    needs_values = True

    def baseline(self, r_N, group_N):
        return r_N

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        return gae(R_NA, values_NA, mask_NA, boot_N, 1.0, 1.0)


def two(reward=(1.0, 0.0), lengths=(2, 3), finish="stop"):
    """A group of two answers; a tool's token stands inside the second."""
    samples = []
    for s, (r, n) in enumerate(zip(reward, lengths, strict=True)):
        turns = [Turn([1, 1], False), Turn([2] * n, True, [-1.0] * n, finish=finish)]
        if s == 1:
            turns = [*turns[:1], Turn([2], True, [-1.0]), Turn([9], False), Turn([2] * (n - 1), True, [-1.0] * (n - 1))]
        samples.append(Trajectory(ROW, turns, (0, s), reward=r))
    return assemble([Group(ROW, 0, samples)])


def with_kl(batch, kl):
    """old_logprobs - ref_logprobs = ``kl`` at every own token, NaN elsewhere, as a forward pass may leave it."""
    mask = batch.tok["loss_mask"]
    poisoned = torch.where(mask, torch.full((batch.tokens,), -1.0), torch.full((batch.tokens,), float("nan")))
    return batch.with_column("tok", "old_logprobs", poisoned).with_column("tok", "ref_logprobs", poisoned - kl)


def own(batch, unit, name="advantages"):
    return batch.tok[name][batch.tok["loss_mask"] & (batch.unit_N == unit)].tolist()


def test_outcome_reward_reaches_every_own_token():
    batch, metrics = credit(two(), Centered())
    assert own(batch, 0) == [0.5, 0.5]
    assert own(batch, 1) == [-0.5, -0.5, -0.5]
    assert not batch.tok["advantages"][~batch.tok["loss_mask"]].any()
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/group_std"] == pytest.approx(0.5**0.5)
    assert (metrics["length/mean"], metrics["length/max"]) == (2.5, 3.0)


def test_kl_comes_after_the_baseline_per_token():
    """R_t = [last] r~ - 0.1 * 2 per token: return-to-go 0.5 - 0.4, 0.5 - 0.2."""
    batch, metrics = credit(with_kl(two(), 2.0), Centered(), kl=KLPenalty(0.1))
    assert own(batch, 0) == pytest.approx([0.1, 0.3])
    assert own(batch, 1) == pytest.approx([-1.1, -0.9, -0.7])
    assert metrics["kl/reference"] == pytest.approx(2.0)
    assert metrics["reward/mean"] == 0.5, "the raw reward stays raw"


def test_kl_before_the_baseline_is_seen_by_it():
    """r = 1 - 0.1 * 4 = 0.6 and 0 - 0.1 * 6 = -0.6: centred to +-0.6, the same at every token."""
    batch, _ = credit(with_kl(two(), 2.0), Centered(), kl=KLPenalty(0.1, before_baseline=True))
    assert own(batch, 0) == pytest.approx([0.6, 0.6])
    assert own(batch, 1) == pytest.approx([-0.6] * 3)


def test_shaping_comes_before_and_clipping_after_the_baseline():
    def shaper(r_U, batch):
        return 2 * (r_U - batch.unit["own_tokens"])

    batch, metrics = credit(two(), Centered(), shaper=shaper, reward_clip=(-10.0, 1.0))
    assert own(batch, 0) == [1.0, 1.0]  # (1 - 2) * 2 = -2, (0 - 3) * 2 = -6: centred 2 and -2, then clipped
    assert own(batch, 1) == [-2.0] * 3
    assert (metrics["reward/mean"], metrics["reward/shaped"]) == (0.5, -4.0)


def test_step_rewards_lie_outside_the_group_baseline():
    batch = two()
    step = torch.zeros(batch.tokens)
    step[2] = 5.0  # first own token of the first answer
    assert "reward/steps" not in credit(batch, Centered())[1]
    batch, metrics = credit(batch.with_column("tok", "step_reward", step), Centered())
    assert metrics["reward/steps"] == 5.0 / 2, "the mean over both trajectories"
    assert metrics["reward/total"] == 0.5 + 2.5
    assert own(batch, 0) == [5.5, 0.5]
    assert own(batch, 1) == [-0.5] * 3


def test_whitening_is_weighted_by_tokens():
    """Advantages 0.5, 0.5, -0.5, -0.5, -0.5: mean -0.1, population variance 0.24."""
    batch, metrics = credit(two(), Whitened())
    assert own(batch, 0) == pytest.approx([0.6 / 0.24**0.5] * 2)
    assert own(batch, 1) == pytest.approx([-0.4 / 0.24**0.5] * 3)
    assert metrics["advantage/mean"] == pytest.approx(-0.1)
    assert metrics["advantage/std"] == pytest.approx(0.24**0.5)


def test_normalise_by_hand():
    values, mask = torch.tensor([1.0, float("nan"), 5.0]), torch.tensor([True, False, True])
    assert pipeline.normalise(values, mask, "whiten").tolist() == [-1.0, 0.0, 1.0]
    assert pipeline.normalise(values, mask, "center").tolist() == [-2.0, 0.0, 2.0]
    assert pipeline.normalise(values, mask, "none").tolist() == [1.0, 0.0, 5.0]
    flat = pipeline.normalise(torch.tensor([2.0, 2.0]), torch.tensor([True, True]), "whiten")
    assert flat.tolist() == [0.0, 0.0]  # the variance is clamped, not divided by
    tiny = pipeline.normalise(torch.tensor([0.0, 2e-6]), torch.tensor([True, True]), "whiten")
    assert tiny.tolist() == pytest.approx([-0.01, 0.01])  # 1e-6 / sqrt(1e-8)


@pytest.mark.parametrize(("finish", "end"), [("length", 3.0), ("stop", 0.0)])
def test_values_and_bootstrap(finish, end):
    """lambda = gamma = 1: A = r + boot - V, and the bootstrap counts for truncated samples only."""
    batch = two(finish=finish)
    batch = batch.with_column("tok", "old_values", torch.full((batch.tokens,), 0.25))
    batch = batch.with_column("tok", "bootstrap", torch.full((batch.tokens,), 3.0), over="last_action")
    batch, metrics = credit(batch, Critic())
    assert own(batch, 0) == pytest.approx([1 + end - 0.25] * 2)
    assert own(batch, 0, "returns") == pytest.approx([1 + end] * 2)
    assert own(batch, 1) == pytest.approx([-0.25] * 3)
    assert metrics["value/mean"] == 0.25
    assert metrics["value/explained_variance"] == pytest.approx(0.0)


def test_metrics_by_hand():
    """Groups with rewards (1, 0), (2, 2) and (3, 3), answers of 2, 3, 1, 2, 1 and 1 tokens, of which one was cut."""
    samples = []
    for number, (reward, n) in enumerate(zip((1.0, 0.0, 2.0, 2.0, 3.0, 3.0), (2, 3, 1, 2, 1, 1), strict=True)):
        answer = Turn([2] * n, True, [-1.0] * n, finish="length" if number == 2 else "stop")
        samples.append(Trajectory(ROW, [Turn([1], False), answer], divmod(number, 2), reward=reward))
    _, metrics = credit(assemble([Group(ROW, g, samples[2 * g : 2 * g + 2]) for g in range(3)]), Centered())
    mean = 11 / 6
    assert metrics == pytest.approx(
        {
            "reward/mean": mean,
            "reward/std": ((1 + 0 + 4 + 4 + 9 + 9) / 6 - mean**2) ** 0.5,  # of the population
            "reward/shaped": mean,
            "reward/after_baseline_std": (0.5 / 6) ** 0.5,  # 0.5, -0.5 and four times 0
            "reward/group_std": 0.5**0.5 / 3,
            "reward/groups_all_equal": 2 / 3,
            "length/mean": 10 / 6,
            "length/max": 3.0,
            "length/truncated": 1 / 6,
            "advantage/mean": -0.05,  # 0.5 at 2 tokens, -0.5 at 3, 0 at 5
            "advantage/std": (5 * 0.25 / 10 - 0.05**2) ** 0.5,
            "advantage/abs_max": 0.5,
        }
    )


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_explained_variance_by_hand(shift):
    """Returns 1, 1, 0, 0 of variance 1/4; the values miss them by 0.5, 0, -0.5, 0 and a constant: 1 - (1/8) / (1/4)."""
    batch = two(lengths=(2, 2))
    values_N = torch.zeros(batch.tokens)
    values_N[batch.tok["loss_mask"]] = torch.tensor([0.5, 1.0, 0.5, 0.0]) + shift
    _, metrics = credit(batch.with_column("tok", "old_values", values_N), Critic())
    assert metrics["value/mean"] == 0.5 + shift
    assert metrics["value/explained_variance"] == pytest.approx(0.5)


def test_an_empty_answer_gives_no_nan():
    """Means over an empty response were 0/0."""
    empty = Trajectory(ROW, [Turn([1, 1], False), Turn([], True, [])], (0, 1), reward=0.0)
    full = Trajectory(ROW, [Turn([1], False), Turn([2], True, [-1.0])], (0, 0), reward=1.0)
    batch = with_kl(assemble([Group(ROW, 0, [full, empty])]), 0.5)
    batch, metrics = credit(batch, Centered(), kl=KLPenalty(0.1))
    assert own(batch, 0) == pytest.approx([0.45])
    assert all(abs(v) < float("inf") for v in metrics.values())


def test_masked_positions_change_nothing_bit_for_bit():
    clean = assemble(fabricate.groups(2))
    mask = clean.tok["loss_mask"]
    for name in ("old_logprobs", "ref_logprobs", "old_values"):
        clean = clean.with_column("tok", name, fabricate.values(name, clean.tokens, 1))
    poisoned = clean
    for name in ("old_logprobs", "ref_logprobs", "old_values", "step_reward"):
        bad = torch.where(mask, clean.tok[name], torch.full((clean.tokens,), float("nan")))
        poisoned = poisoned.with_column("tok", name, bad, over=None)
    for advantage in (Whitened(), Critic()):
        kl = KLPenalty(0.1, "k3")
        (a, metrics), (b, other) = credit(clean, advantage, kl=kl), credit(poisoned, advantage, kl=kl)
        assert torch.equal(a.tok["advantages"], b.tok["advantages"])
        assert metrics == other


def test_an_advantage_that_is_not_finite_is_fatal():
    class Broken(Centered):
        def returns(self, R_NA, mask_NA, values_NA, boot_N):
            return R_NA / 0, R_NA

    class Lost(Centered):
        def returns(self, R_NA, mask_NA, values_NA, boot_N):
            return R_NA, R_NA[:, :1]

    with pytest.raises(TrainingError, match=r"advantage 'centered' must return finite advantages"):
        credit(two(), Broken())
    with pytest.raises(TrainingError, match=r"must return finite returns of shape \(2, 3\), got shape \(2, 1\)"):
        credit(two(), Lost())


def test_an_advantage_that_returns_one_tensor_is_refused():
    class One(Centered):
        def returns(self, R_NA, mask_NA, values_NA, boot_N):
            return R_NA

    with pytest.raises(TrainingError, match=r"'centered' must return .advantages, returns., .*got Tensor"):
        credit(two(), One())


@pytest.mark.parametrize("advantage", [Whitened(), Critic()])
def test_a_batch_in_blocks_gets_the_same_numbers(monkeypatch, advantage):
    """With 7 values in a matrix at most, most trajectories are alone in theirs."""
    groups = []
    for g in range(5):
        samples = []
        for s in range(3):
            answer = Turn([2] * (1 + (3 * g + s) % 6), True, [-1.0] * (1 + (3 * g + s) % 6), finish="length")
            samples.append(Trajectory(ROW, [Turn([1, 1], False), answer], (g, s), reward=float(g * s % 4)))
        groups.append(Group(ROW, g, samples))
    batch = assemble(groups)
    random = torch.Generator().manual_seed(0)
    for name in ("old_values", "bootstrap", "step_reward"):
        batch = batch.with_column("tok", name, torch.randn(batch.tokens, generator=random))
    full, metrics = credit(batch, advantage)
    widths = []
    advantage = type(advantage)()
    monkeypatch.setattr(advantage, "returns", lambda R_NA, *rest, returns=advantage.returns: (
        widths.append(tuple(R_NA.shape)), returns(R_NA, *rest))[1], raising=False)  # fmt: skip
    monkeypatch.setattr(pipeline, "BLOCK", 7)
    monkeypatch.setattr(pipeline, "BLOCK_WITH_VALUES", 7)
    blocks, block_metrics = credit(batch, advantage)
    assert len(widths) > 8
    assert sum(units for units, _ in widths) == 15
    assert metrics == block_metrics
    assert full.tok.keys() == blocks.tok.keys()
    assert all(torch.equal(values_N, blocks.tok[name]) for name, values_N in full.tok.items())


def test_a_stage_can_be_reordered():
    """The stages are public functions: an algorithm that clips before the baseline needs three lines."""
    batch = two(reward=(5.0, 0.0))
    r_U = pipeline.clip_rewards(batch.unit["reward"], (-1.0, 1.0))
    R_N = pipeline.token_rewards(batch, Centered().baseline(r_U, batch.unit["group"]), None, 0.0)
    _, raw = pipeline.returns(batch, Centered(), R_N)
    assert raw[batch.tok["loss_mask"]].tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]


def test_token_rewards_are_zero_outside_the_own_tokens():
    batch = two()
    nan = torch.full((batch.tokens,), float("nan"))
    kl_N = torch.where(batch.tok["loss_mask"], 1.0, nan)
    poisoned = batch.with_column("tok", "step_reward", torch.where(batch.tok["loss_mask"], 0.0, nan), over=None)
    R_N = pipeline.token_rewards(poisoned, batch.unit["reward"], kl_N, 0.5)
    assert R_N.tolist() == [0, 0, -0.5, 0.5, 0, 0, -0.5, 0, -0.5, -0.5]


def test_what_a_baseline_or_turn_credit_returns_is_refused_if_it_is_not_one_value_each():
    class Twice(Centered):
        def baseline(self, r_N, group_N):
            return torch.cat([r_N, r_N])

    class Listed(Centered):
        def baseline(self, r_N, group_N):
            return r_N.tolist()

    class NoReturns(Centered):
        def returns(self, R_NA, mask_NA, values_NA, boot_N):
            return R_NA, None

    class TurnList(Centered):
        def turn_credit(self, reward_M, state_M, trajectory_M):
            return reward_M.tolist()

    one_each = r"baseline\(\) of advantage 'centered' must return one value for each of the 2 rewards, a tensor of "
    with pytest.raises(TrainingError, match=one_each + r"shape \(2,\), got shape \(4,\)"):
        credit(two(), Twice())
    with pytest.raises(TrainingError, match=one_each + r"shape \(2,\), got list"):
        credit(two(), Listed())
    with pytest.raises(TrainingError, match=r"two tensors of shape \(2, 3\), got tuple of shape \(2, 3\), NoneType"):
        credit(two(), NoReturns())
    turns = two().with_column("tok", "turn", torch.zeros(two().tokens, dtype=torch.int64))
    for name in ("state", "turn_reward"):
        turns = turns.with_column("tok", name, turns.tok["turn"].to(torch.float64 if "_" in name else torch.int64))
    with pytest.raises(TrainingError, match=r"turn_credit\(\) of advantage 'centered' .* got list in place of"):
        credit(turns, TurnList())


def test_a_baseline_that_works_in_place_changes_no_metric_of_the_rewards():
    class InPlace(Centered):
        def baseline(self, r_N, group_N):
            r_N -= r_N.mean()
            return r_N

    batch, metrics = credit(two(), InPlace())
    other, expected = credit(two(), Centered())
    assert torch.equal(batch.tok["advantages"], other.tok["advantages"])
    assert metrics == expected
    assert metrics["reward/mean"] == 0.5
    assert batch.unit["reward"].tolist() == two().unit["reward"].tolist(), "finish() reads it for running statistics"


@pytest.mark.parametrize("mode", ["mean", None])
def test_an_unknown_normalisation_is_refused(mode):
    class Unknown(Centered):
        normalise = mode

    with pytest.raises(TrainingError, match=rf"normalise is {mode!r}; allowed: 'none', 'center', 'whiten'"):
        credit(two(), Unknown())
