"""An algorithm that overrides a method of its base is refused if an option would silently have no effect."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import ConfigError
from rlhf.interfaces import Advantage, Loss
from rlhf.ops.returns import return_to_go
from rlhf.types import LossOutput, Reduce, Update
from rlhf_algorithms import pipeline
from rlhf_algorithms.policy_gradient import PolicyGradient
from rlhf_algorithms.policy_gradient_config import KLConfig, ShapingConfig
from rlhf_testing import fabricate


class Plain(Advantage):
    """Return-to-go."""

    name = "plain"

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        to_go_NA = return_to_go(R_NA, mask_NA, gamma=1.0)
        return to_go_NA, to_go_NA


class Score(Loss):
    """The score function times the advantage."""

    name = "score"

    def outputs(self):
        return ("logprobs",)

    def columns(self):
        return ("advantages",)

    def reduce(self):
        return {"policy": Reduce()}

    def __call__(self, x):
        return LossOutput({"policy": -x["logprobs"] * x["advantages"]})


class ClipsFirst(PolicyGradient):
    """Clips rewards before the baseline; applies no other option."""

    name = "clips_first"
    applies = ("reward_clip",)

    def stages(self, batch, kl):
        r_U = pipeline.clip_rewards(batch.unit["reward"], self.config.reward_clip)
        R_N = pipeline.token_rewards(batch, pipeline.baseline(batch, self.advantage, r_U), None, 0.0)
        batch, raw_N = pipeline.returns(batch, self.advantage, R_N)
        return batch.with_column("tok", "advantages", raw_N), {}


class WholeCredit(ClipsFirst):
    """Everything by itself."""

    name = "whole_credit"
    applies = ()

    def credit(self, batch):
        return self.stages(batch, None)


class Counts(PolicyGradient):
    """Adds a metric."""

    name = "counts"

    def credit(self, batch):
        batch, metrics = super().credit(batch)
        return batch, {**metrics, "units": float(batch.units)}


class OneUpdate(PolicyGradient):
    """Plans by itself."""

    name = "one_update"

    def updates(self, step, batch=None):
        return [Update("policy", "loss")]


def build(cls, **config):
    return cls(cls.Config(**config), {"advantage": Plain(), "loss": Score()})


IN_REWARD = {"kl": KLConfig(coef=0.1)}


@pytest.mark.parametrize(
    ("cls", "config", "lost"),
    [
        (
            ClipsFirst,
            IN_REWARD,
            "algorithm.kl.coef would have no effect: ClipsFirst.stages() of algorithm 'clips_first' replaces",
        ),
        (
            ClipsFirst,
            {"shaping": ShapingConfig(stop_properly=0.5)},
            "algorithm.shaping would have no effect: ClipsFirst.stages()",
        ),
        (
            WholeCredit,
            {"mask_truncated": True},
            "algorithm.mask_truncated would have no effect: WholeCredit.credit() of",
        ),
        (
            WholeCredit,
            {"mask_truncated": True, **IN_REWARD},
            "algorithm.kl.coef, algorithm.mask_truncated would have no effect:",
        ),
        (OneUpdate, {"epochs": 2}, "algorithm.epochs would have no effect: OneUpdate.updates()"),
        (OneUpdate, {"minibatches": 2}, "OneUpdate.applies = ('minibatches',)"),
        (
            OneUpdate,
            {"kl": KLConfig(coef=0.1, snapshot_every=2)},
            "algorithm.kl.snapshot_every would have no effect: OneUpdate",
        ),
    ],
)
def test_an_option_that_an_override_would_lose_is_refused(cls, config, lost):
    with pytest.raises(ConfigError) as error:
        build(cls, **config)
    assert lost in str(error.value)


def test_options_applied_outside_the_stages_still_apply():
    groups = fabricate.groups(0, logprobs=False)
    algorithm = build(ClipsFirst, mask_truncated=True, reward_clip=(-0.1, 0.1))
    batch, _ = algorithm.credit(algorithm.assemble(groups)[0])
    truncated = sum(t.truncated for g in groups for t in g.trajectories)
    assert truncated > 0
    assert batch.units == sum(len(g.trajectories) for g in groups) - truncated
    assert batch.tok["advantages"].abs().max() == pytest.approx(0.1)


def test_options_that_are_named_or_that_the_base_applies_are_fine():
    build(ClipsFirst, reward_clip=(-1.0, 1.0))
    build(ClipsFirst, kl=KLConfig(coef=0.1, where="loss"))
    build(Counts, mask_truncated=True, epochs=2, **IN_REWARD)

    class Further(ClipsFirst):
        """Declares the options that its base applies."""

        applies = ("kl.coef",)

    build(Further, **IN_REWARD, reward_clip=(-1.0, 1.0))


def test_an_option_that_does_not_exist_cannot_be_named():
    class Misspelt(ClipsFirst):
        """A typo."""

        applies = ("kl.coeff",)

    with pytest.raises(
        ConfigError, match=r"Misspelt.applies names unknown options \['kl.coeff'\]; allowed are kl.coef"
    ):
        build(Misspelt)


def test_a_baseline_may_weigh_by_lengths():
    class ByLength(Plain):
        """OPO, Hao et al. 2025, arXiv:2505.23585: the mean of the group, weighted by lengths."""

        group_min = 2

        def baseline(self, r_N, group_N, own_tokens_N=None):
            made_N = torch.empty_like(r_N)
            for group in group_N.unique():
                mask_N = group_N == group
                made_N[mask_N] = r_N[mask_N] - (r_N[mask_N] * own_tokens_N[mask_N]).sum() / own_tokens_N[mask_N].sum()
            return made_N

    algorithm = PolicyGradient(None, {"advantage": ByLength(), "loss": Score()})
    groups = fabricate.groups(0, logprobs=False)
    batch, _ = algorithm.credit(algorithm.assemble(groups)[0])
    for number, group in enumerate(groups):
        lengths = [t.sampled_tokens for t in group.trajectories]
        mean = sum(t.reward * n for t, n in zip(group.trajectories, lengths, strict=True)) / sum(lengths)
        for sample, trajectory in enumerate(group.trajectories):
            unit = batch.select([number * len(group.trajectories) + sample])
            advantages = unit.tok["advantages"][unit.tok["loss_mask"]]
            assert advantages.tolist() == pytest.approx([trajectory.reward - mean] * lengths[sample], rel=1e-5)
