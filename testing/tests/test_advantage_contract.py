"""The advantage suite passes well-made estimators and names the rule that a broken one breaks."""

from __future__ import annotations

import pytest
import torch
from rlhf.interfaces import Advantage, ComponentConfig
from rlhf.ops.groups import group_center, group_mean
from rlhf.ops.returns import gae, return_to_go
from rlhf_testing.advantage import AdvantageContract
from rlhf_testing.contract import Nonconformance

from tests.support.parts import Centered


class Critic(Advantage):
    """Reads values for one config and none for another."""

    name = "critic"

    class Config(ComponentConfig):
        lam: float = 0.95
        """Decay."""
        values: bool = True
        """Read a critic."""

    @property
    def needs_values(self):
        return self.config.values

    @property
    def normalise(self):
        return "whiten"

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        if not self.config.values:
            total = return_to_go(R_NA, mask_NA, gamma=0.99)
            return total, total
        return gae(R_NA, values_NA, mask_NA, boot_N, 0.99, self.config.lam)


class TestCritic(AdvantageContract):
    advantage = Critic
    registered = False
    configs = [Critic.Config(), Critic.Config(values=False), Critic.Config(lam=1.0)]


# ------------------------------------------------------------------------------- broken on purpose


class BatchOrder(Centered):
    """A running mean over the batch."""

    def baseline(self, r_N, group_N):
        return r_N - r_N.cumsum(0) / torch.arange(1, len(r_N) + 1)


class BatchMean(Centered):
    """The mean of the batch, as if that were the group's."""

    def baseline(self, r_N, group_N):
        return r_N - r_N.mean()


class One(Centered):
    """Forgets the returns."""

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        return super().returns(R_NA, mask_NA, values_NA, boot_N)[0]


class PerTrajectory(Centered):
    """One number for each trajectory, not for each token."""

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        total_N = R_NA.sum(1)
        return total_N, total_N


class WholeBatch(Centered):
    """Whitens in returns()."""

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        adv, ret = super().returns(R_NA, mask_NA, values_NA, boot_N)
        return adv - adv[mask_NA].mean(), ret


class MaskTimesNan(Centered):
    """Multiplies by the mask."""

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        adv = (R_NA * mask_NA).flip(1).cumsum(1).flip(1)
        return adv, adv


class NotCentered(Centered):
    """Declares a group baseline that it does not have."""

    def baseline(self, r_N, group_N):
        return r_N - 0.5 * group_mean(r_N, group_N)


class DividesByZero(Centered):
    """Scales by a standard deviation of zero."""

    def baseline(self, r_N, group_N):
        centered_N = group_center(r_N, group_N)
        return centered_N / centered_N.std()


class NeedsValues(Critic):
    """Forgets to declare the critic."""

    needs_values = False

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        return gae(R_NA, values_NA, mask_NA, boot_N, 1.0, 1.0)


class Narrow(Centered):
    """Float32 baseline."""

    def baseline(self, r_N, group_N):
        return group_center(r_N, group_N).float()


class NoDecay(Critic):
    """Never reads lam."""

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        return gae(R_NA, values_NA, mask_NA, boot_N, 0.99, 0.95)


class NoGroupMin(Centered):
    """Compares with the group, but declares that a group of one is enough."""

    group_min = 1


class GroupOfNone(Centered):
    """Declares that a group of no sample is enough."""

    group_min = 0


class HalfASample(Centered):
    """Declares a number of samples that is no integer."""

    group_min = 1.5


def suite(estimator, **attributes):
    return type("Broken", (AdvantageContract,), {"advantage": estimator, "registered": False, **attributes})()


@pytest.mark.parametrize(
    ("estimator", "check", "message"),
    [
        (BatchOrder, "test_order_of_samples", "depends on the order of the trajectories"),
        (BatchMean, "test_other_groups", "depends on the rewards of other groups"),
        (One, "test_shapes", r"must give .advantages, returns., .* shape \(12, 9\), got torch.float32 \(12, 9\)"),
        (One, "test_masked_positions", "must give .advantages, returns."),
        (One, "test_declared_needs", "must give .advantages, returns."),
        (PerTrajectory, "test_finite", r"of shape \(\d+, 9\) and a floating type, got torch.float32 \(\d+,\)"),
        (WholeBatch, "test_order_of_samples", "depend on others in returns"),
        (MaskTimesNan, "test_masked_positions", "NaN at masked positions changes the advantages"),
        (NotCentered, "test_equal_rewards", "equal rewards of 1.0 give a credit of 0.5"),
        (DividesByZero, "test_finite", "baseline.. is not finite"),
        (NeedsValues, "test_declared_needs", "needs_values is False"),
        (Narrow, "test_shapes", "must give float64"),
        (GroupOfNone, "test_declared_needs", "group_min is 0; it must be an integer of at least 1"),
        (HalfASample, "test_declared_needs", "group_min is 1.5; it must be an integer of at least 1"),
        (NoGroupMin, "test_smallest_group", r"gives 0 for every sample in groups of 1 .* Declare group_min = 2"),
    ],
)
def test_broken_estimator_fails_the_right_check(estimator, check, message):
    with pytest.raises(Nonconformance, match=message):
        getattr(suite(estimator), check)()


def test_an_option_that_nothing_reads_is_noticed():
    configs = [Critic.Config(lam=0.5)]
    suite(Critic, configs=configs).test_options()
    with pytest.raises(Nonconformance, match=r"with lam = 0\.5: lam changes nothing"):
        suite(NoDecay, configs=configs).test_options()


def test_a_missing_group_min_passes_every_other_check():
    """So it is this check that finds it."""
    for name in (n for n in dir(AdvantageContract) if n.startswith("test_") and n != "test_smallest_group"):
        if name not in ("test_statement", "test_entry_point"):
            getattr(suite(NoGroupMin), name)()


def test_wrong_statement_is_noticed():
    def statement_baseline(self, r_N, group_N, config):
        return r_N - r_N.mean()

    with pytest.raises(Nonconformance, match="differs from the statement"):
        suite(Centered, statement_baseline=statement_baseline).test_statement()
