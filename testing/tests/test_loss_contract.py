"""The loss suite passes well-made losses and names the rule that a broken one breaks."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import ComponentConfig, Loss
from rlhf.types import LossOutput, Reduce
from rlhf_testing.contract import Nonconformance
from rlhf_testing.loss import LossContract

from tests.support.losses import NllLoss


class Surrogate(Loss):
    """Two terms, a bounded ratio, a metric and a column of its own."""

    name = "surrogate"

    class Config(ComponentConfig):
        entropy: float = 0.01
        """Weight of the bonus."""
        limit: float = 20.0
        """Bound of the log-ratio."""

    def outputs(self):
        return ("logprobs", "entropy") if self.config.entropy else ("logprobs",)

    def columns(self):
        return ("advantages", "old_logprobs")

    def reduce(self):
        terms = {"policy": Reduce("seq_mean_token_mean")}
        return terms | ({"bonus": Reduce("token_mean", coef=-self.config.entropy)} if self.config.entropy else {})

    def __call__(self, x):
        ratio = (x["logprobs"] - x["old_logprobs"]).clamp(-self.config.limit, self.config.limit).exp()
        terms = {"policy": -ratio * x["advantages"]}
        if self.config.entropy:
            terms["bonus"] = x["entropy"]
        return LossOutput(terms, {"ratio": ("token", ratio)})


class TestSurrogate(LossContract):
    loss = Surrogate
    registered = False
    configs = [Surrogate.Config(), Surrogate.Config(entropy=0.0)]

    def statement(self, x_BT):
        m, c = x_BT.mask_BT, x_BT.config
        ratio = (x_BT["logprobs"] - x_BT["old_logprobs"]).clamp(-c.limit, c.limit).exp()
        live = m.any(1)
        policy = (-(ratio * x_BT["advantages"] * m).sum(1)[live] / m.sum(1)[live]).mean()
        return policy - (c.entropy * (x_BT["entropy"] * m).sum() / m.sum() if c.entropy else 0.0)


# ------------------------------------------------------------------------------- broken on purpose


def suite(cls, **attributes):
    return type("Broken", (LossContract,), {"loss": cls, "registered": False, **attributes})()


class PerMicroBatch(NllLoss):
    """Divides by the tokens of its own micro-batch."""

    def __call__(self, x):
        values = -x["logprobs"]
        return LossOutput({"nll": values / x.tokens * 10})


class OwnMean(NllLoss):
    """Returns a scalar."""

    def __call__(self, x):
        return LossOutput({"nll": -x["logprobs"].mean()})


class IgnoresMask(NllLoss):
    """Reads tokens that the mask hides."""

    def columns(self):
        return ("bonus",)

    def __call__(self, x):
        return LossOutput({"nll": -x["logprobs"] + 0.0 * x["logprobs"] + x._batch.tok["bonus"].sum()})


class OrderStatistic(NllLoss):
    """prepare() depends on the packing order."""

    def columns(self):
        return ("bonus",)

    def prepare(self, batch):
        return batch.with_column("tok", "bonus", batch.tok["bonus"] * torch.arange(batch.tokens))

    def __call__(self, x):
        return LossOutput({"nll": x["logprobs"] * x["bonus"]})


class Undeclared(NllLoss):
    """Reads a column for one config only, and does not declare it."""

    class Config(ComponentConfig):
        weighted: bool = False
        """Multiply by the advantage."""

    def __call__(self, x):
        weight = x["advantages"] if self.config.weighted else 1.0
        return LossOutput({"nll": -x["logprobs"] * weight})


class Unbounded(Surrogate):
    """exp() of an unbounded log-ratio."""

    def __call__(self, x):
        ratio = (x["logprobs"] - x["old_logprobs"]).exp()
        return LossOutput({"policy": -ratio * x["advantages"], "bonus": x["entropy"]})


class Detached(NllLoss):
    """No gradient."""

    def __call__(self, x):
        return LossOutput({"nll": -x["logprobs"].detach()})


class BatchMetric(NllLoss):
    """A metric that depends on the micro-batch."""

    def __call__(self, x):
        values = -x["logprobs"]
        share = torch.full_like(values, 1.0 / max(x.tokens, 1))
        return LossOutput({"nll": values}, {"share": ("token", share)})


class Stateful(NllLoss):
    """Counts its calls."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return LossOutput({"nll": -x["logprobs"] * self.calls})


class Needless(Surrogate):
    """Declares a factor of one of its two terms."""

    def signal(self):
        return ("advantages",)


class Elsewhere(NllLoss):
    """Declares a column that it does not read."""

    def signal(self):
        return ("weight",)


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (Needless, "test_signal", "advantages.*gradient of entropy"),
        (Elsewhere, "test_signal", r"signal\(\) names \['weight'\]"),
        (PerMicroBatch, "test_split_invariance", "declare reduce"),
        (OrderStatistic, "test_split_invariance", "reversed packing order"),
        (IgnoresMask, "test_masked_positions", "NaN at masked positions changes the loss"),
        (Unbounded, "test_finite", "not finite|loss is"),
        (Detached, "test_gradient_reaches", "no gradient reaches"),
        (BatchMetric, "test_split_invariance", "metric 'share'"),
        (Stateful, "test_declared_needs", "different values"),
    ],
)
def test_broken_loss_fails_the_right_check(cls, check, message):
    with pytest.raises(Nonconformance, match=message):
        getattr(suite(cls), check)()


def test_a_signal_is_right_where_it_is_a_factor_of_all_terms():
    suite(Needless, configs=[Needless.Config(entropy=0.0)]).test_signal()


def test_scalar_instead_of_values_is_refused():
    with pytest.raises(TrainingError, match="needs"):
        suite(OwnMean).test_split_invariance()


def test_undeclared_column_is_found_only_by_the_grid():
    suite(Undeclared).test_declared_needs()
    grid = [Undeclared.Config(), Undeclared.Config(weighted=True)]
    with pytest.raises(TrainingError, match="reads 'advantages', which it does not declare"):
        suite(Undeclared, configs=grid).test_declared_needs()


def test_wrong_statement_is_noticed():
    def statement(self, x_BT):
        return -(x_BT["logprobs"] * x_BT.mask_BT).sum() / x_BT.mask_BT.numel()

    with pytest.raises(Nonconformance, match="the statement gives"):
        suite(NllLoss, statement=statement).test_statement()


def test_missing_statement_is_a_skip_that_says_so():
    import unittest

    with pytest.raises(unittest.SkipTest, match="statement"):
        suite(NllLoss).test_statement()
