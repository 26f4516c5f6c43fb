"""Reward models: the loss by hand, the layout of pairs, and the statistics of the scores."""

from __future__ import annotations

import math

import pytest
from rlhf.types import Row
from rlhf.types.examples import Example
from rlhf.types.examples import Sequence as TokenSequence
from rlhf_plugin_reward_model import PairwiseLoss, RewardModel

from tests.support import pairs


def make(**config) -> RewardModel:
    return RewardModel(RewardModel.Config(**config), parts={"loss": PairwiseLoss()})


def pair(index: int = 0, masks=((False, True), (False, True, True)), **values) -> Example:
    sequences = [TokenSequence([5 + i for i in range(len(m))], list(m), role) for role, m in enumerate(masks)]
    return Example(Row({}, "data", index), sequences, values)


BATCH = make().assemble([pair()])[0]


def loss_of(scores, examples, **config):
    return pairs.loss_of(RewardModel, PairwiseLoss(PairwiseLoss.Config(**config)), scores, examples, "scores")


@pytest.mark.parametrize("form", ["sigmoid", "logexp"])
def test_the_loss_by_hand(form: str) -> None:
    loss, gradient, metrics = loss_of([1.0, 0.0, -1.0, 2.0], [pair(0), pair(1)], loss_type=form)
    first, second = math.log(1 + math.exp(-1)), math.log(1 + math.exp(3))
    assert loss == pytest.approx((first + second) / 2, rel=1e-6)
    slopes = [-1 / (1 + math.exp(1)) / 2, -1 / (1 + math.exp(-3)) / 2]
    assert gradient == pytest.approx([slopes[0], -slopes[0], slopes[1], -slopes[1]], rel=1e-5)
    expected = {
        "loss": loss, "loss/pairwise": loss, "accuracy": 0.5, "margin": -1.0, "chosen_score": 0.0,
        "rejected_score": 1.0, "score_mean": 0.5, "score_square": 1.5,
    }  # fmt: skip
    assert metrics == pytest.approx(expected)


@pytest.mark.parametrize("form", ["sigmoid", "logexp"])
def test_both_forms_subtract_the_margin(form: str) -> None:
    loss, gradient, metrics = loss_of([1.0, 0.0], [pair(margin=3.0)], loss_type=form)
    assert loss == pytest.approx(math.log(1 + math.exp(2)), rel=1e-6)
    assert gradient[0] == pytest.approx(-1 / (1 + math.exp(-2)), rel=1e-5)
    assert (metrics["accuracy"], metrics["margin"]) == (1.0, 1.0)  # of the scores: the margin is the target


@pytest.mark.parametrize("form", ["sigmoid", "logexp"])
@pytest.mark.parametrize(("scores", "loss", "slope"), [((1e4, -1e4), 0.0, 0.0), ((-1e4, 1e4), 2e4, -1.0)])
def test_differences_that_overflow_an_exponential(form: str, scores, loss: float, slope: float) -> None:
    value, gradient, _ = loss_of(scores, [pair()], loss_type=form)
    assert value == pytest.approx(loss)
    assert gradient == pytest.approx([slope, -slope])


def test_centring_adds_the_squared_sum() -> None:
    plain, _, _ = loss_of([1.5, 1.0], [pair()])
    centred, _, metrics = loss_of([1.5, 1.0], [pair()], center_coef=0.1)
    assert centred == pytest.approx(plain + 0.1 * 2.5**2)
    assert metrics["loss/center"] == pytest.approx(0.625)
    assert metrics["loss/pairwise"] == pytest.approx(plain)


def test_equal_scores_count_as_one_half() -> None:
    assert loss_of([1.0, 1.0], [pair()])[2]["accuracy"] == 0.5


def test_pairs_become_units_with_their_margins() -> None:
    batch = make().assemble([pair(0, margin=0.5), pair(1, margin=-1.0)])[0]
    assert (batch.units, batch.role_B.tolist()) == (2, [0, 1, 0, 1])
    assert batch.unit["margin"].tolist() == [0.5, -1.0]
    assert not make().assemble([pair()])[0].has("margin")


def test_a_pair_of_empty_answers_is_left_out() -> None:
    empty = pair(0, masks=((True, False), (True,)))  # nothing predicts a first token
    half = pair(1, masks=((False, False), (False, True)))
    assert make().assemble([empty]) == (None, {})
    assert make().assemble([empty, half])[0].units == 1


def test_an_export_has_the_statistics_of_the_last_evaluation() -> None:
    algorithm = make()
    assert algorithm.model_config() == {}
    algorithm.finish(0, BATCH, {"policy/score_mean": 1.0, "policy/score_square": 5.0})
    assert algorithm.model_config() == pytest.approx({"mean": 1.0, "std": 2.0})
    algorithm.evaluated({"eval/score_mean": 3.0, "eval/score_square": 13.0})
    algorithm.finish(1, BATCH, {"policy/score_mean": 9.0, "policy/score_square": 90.0})
    assert algorithm.model_config() == pytest.approx({"mean": 3.0, "std": 2.0})
    other = make()
    other.load_state_dict(algorithm.state_dict())
    other.evaluated({"eval/loss": 0.5})  # another loss reports no scores
    assert other.model_config() == pytest.approx({"mean": 3.0, "std": 2.0})


def test_running_moments_fade_and_survive_a_checkpoint() -> None:
    algorithm = make(moments_decay=0.5)
    algorithm.finish(0, BATCH, {"policy/score_mean": 0.0, "policy/score_square": 4.0})
    algorithm.finish(1, BATCH, {})  # a skipped step has no metrics
    other = make(moments_decay=0.5)
    other.load_state_dict(algorithm.state_dict())
    other.finish(2, BATCH, {"policy/score_mean": 3.0, "policy/score_square": 10.0})
    # weights 1/4 and 1/2 of 3/4: mean 2, square 8
    assert other.model_config() == pytest.approx({"mean": 2.0, "std": 2.0})
    assert algorithm.model_config() == pytest.approx({"mean": 0.0, "std": 2.0})


def test_equal_scores_have_no_deviation() -> None:
    """0.0, also where rounding makes the mean square smaller than the squared mean."""
    algorithm = make()
    algorithm.finish(0, BATCH, {"policy/score_mean": 0.1, "policy/score_square": 0.00999})
    assert algorithm.model_config()["std"] == 0.0
