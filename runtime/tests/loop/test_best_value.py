import json
import math

import pytest
from rlhf.errors import CheckpointError, ConfigError
from rlhf_runtime.loop.best_value import BestTracker


def result(tracker, step, metrics):
    """(whether the evaluation is the best so far, whether patience is exhausted)."""
    return tracker.update(step, metrics), tracker.exhausted


def test_best_and_patience():
    tracker = BestTracker("pass@1", "auto", patience=2)
    values = [0.1, 0.3, 0.3, 0.2, 0.4]
    results = [result(tracker, step, {"eval/pass@1": v}) for step, v in enumerate(values)]
    assert results == [(True, False), (True, False), (False, False), (False, True), (True, False)]
    assert (tracker.value, tracker.step) == (0.4, 4)


def test_losses_go_down():
    tracker = BestTracker()  # neither metric nor mode given
    assert result(tracker, 1, {"eval/loss": 2.0, "reward": 1.0}) == (True, False)
    assert result(tracker, 2, {"eval/loss": 1.5}) == (True, False)
    assert result(tracker, 3, {"eval/loss": 1.6}) == (False, False)
    assert BestTracker("eval/val_loss").update(1, {"eval/val_loss": 1.0})
    maximise = BestTracker("loss", "max")
    maximise.update(1, {"loss": 1.0})
    assert result(maximise, 2, {"loss": 2.0}) == (True, False)


@pytest.mark.parametrize(
    "metric",
    ["loss/sigmoid", "eval/loss/odds", "loss/nll", "divergence", "eval/kl", "nll", "eval/truncated", "gsm/unscored"],
)
def test_losses_divergences_and_failures_improve_downwards(metric):
    tracker = BestTracker(metric)
    assert [tracker.update(step, {metric: v}) for step, v in enumerate([2.0, 1.0, 3.0])] == [True, True, False]


@pytest.mark.parametrize("metric", ["accuracy", "eval/lossless/pass@1", "reward_margin", "agreement"])
def test_other_metrics_improve_upwards(metric):
    tracker = BestTracker(metric)
    assert [tracker.update(step, {metric: v}) for step, v in enumerate([2.0, 1.0, 3.0])] == [True, False, True]


def test_pass_at_1_is_preferred_over_score_this_over_reward_and_this_over_loss():
    numbers = {"eval/loss": 2.0, "eval/reward": 0.3, "eval/score": 0.4, "eval/pass@1": 0.5}
    for metric in ("eval/pass@1", "eval/score", "eval/reward", "eval/loss"):
        tracker = BestTracker()
        tracker.update(1, numbers)
        assert tracker.metric == metric
        del numbers[metric]


@pytest.mark.parametrize(("metric", "prefix"), [("score", ""), ("eval/score", ""), ("gsm/score", "gsm/")])
def test_an_evaluation_without_a_score_has_scores_equal_to_its_rewards(metric, prefix):
    tracker, score, reward = BestTracker(metric), f"eval/{prefix}score", f"eval/{prefix}reward"
    evaluations = [{reward: 0.2}, {reward: 0.9, score: 0.1}, {reward: 0.9, score: 0.5}, {reward: 0.4}, {reward: 0.6}]
    results = [tracker.update(step, numbers) for step, numbers in enumerate(evaluations)]
    assert results == [True, False, True, False, True]
    assert (tracker.metric, tracker.value) == (score, 0.6)
    with pytest.raises(ConfigError, match="agent/first/score"):
        BestTracker("agent/first/score").update(1, {"eval/reward": 0.2})


def test_nan_never_improves():
    tracker = BestTracker("a", patience=1)
    assert result(tracker, 1, {"a": math.nan}) == (False, True)
    assert result(tracker, 2, {"a": 0.0}) == (True, False)
    assert result(tracker, 3, {"a": math.nan}) == (False, True)


@pytest.mark.parametrize("restored", [BestTracker("pass@1", patience=3), BestTracker(None, patience=3)])
def test_state_survives_a_restart(restored):
    tracker = BestTracker("pass@1", patience=3)
    tracker.update(4, {"eval/pass@1": 1 / 3})
    tracker.update(5, {"eval/pass@1": 0.2})
    restored.load_state_dict(json.loads(json.dumps(tracker.state_dict(), allow_nan=False)))
    assert (restored.value, restored.step, restored.waited) == (1 / 3, 4, 1)
    assert result(restored, 6, {"eval/pass@1": 0.33}) == (False, False)
    assert result(restored, 7, {"eval/pass@1": 0.33}) == (False, True)


def test_an_evaluation_whose_answers_got_no_reward_is_one_without_improvement():
    tracker = BestTracker(patience=2)
    assert result(tracker, 1, {"eval/length": 3.0, "eval/unscored": 1.0}) == (False, False)
    assert result(tracker, 2, {"eval/pass@1": 0.5, "eval/unscored": 0.0}) == (True, False)
    assert result(tracker, 3, {"eval/length": 3.0, "eval/unscored": 1.0}) == (False, False)
    second = BestTracker("pass@4")
    second.update(1, {"eval/pass@1": 0.5, "eval/pass@4": 0.7, "eval/unscored": 0.1})
    assert result(second, 2, {"eval/pass@1": 0.5, "eval/unscored": 0.6}) == (False, False), "no prompt has four"
    with pytest.raises(ConfigError, match="does not report"):
        BestTracker("pass@3").update(1, {"eval/pass@1": 0.5, "eval/unscored": 0.6})


@pytest.mark.parametrize("name", ["env/solved", "rollout/calls/add"])
def test_a_number_of_samples_may_be_the_metric(name):
    tracker = BestTracker(name)
    assert result(tracker, 1, {"eval/pass@1": 0.5, f"eval/{name}": 0.2}) == (True, False)
    assert result(tracker, 2, {"eval/pass@1": 0.9}) == (False, False), "no sample has it this time"
    assert result(tracker, 3, {"eval/pass@1": 0.1, f"eval/{name}": 0.3}) == (True, False)
    with pytest.raises(ConfigError, match="does not report"):
        BestTracker(name).update(1, {"eval/pass@1": 0.5})


def test_a_metric_that_was_never_there_may_be_corrected():
    wrong = BestTracker("pass@3")
    with pytest.raises(ConfigError, match="does not report"):
        wrong.update(1, {"eval/pass@1": 0.5})
    right = BestTracker("pass@1")
    right.load_state_dict(wrong.state_dict())
    assert result(right, 2, {"eval/pass@1": 0.4}) == (True, False)


def test_state_before_the_first_evaluation():
    restored = BestTracker("pass@1")
    restored.load_state_dict(BestTracker("pass@1").state_dict())
    assert result(restored, 1, {"eval/pass@1": 0.0}) == (True, False)


def test_the_state_of_another_metric_is_refused():
    tracker = BestTracker("pass@1")
    tracker.update(1, {"eval/pass@1": 0.5})
    metrics = r"best value in the checkpoint is of 'eval/pass@1' \(max\), but this run uses 'loss'"
    with pytest.raises(CheckpointError, match=metrics):
        BestTracker("loss").load_state_dict(tracker.state_dict())
    with pytest.raises(CheckpointError, match=r"Restore eval\.metric and eval\.mode"):
        BestTracker("pass@1", "min").load_state_dict(tracker.state_dict())


def test_a_missing_metric_names_those_present():
    message = r"'pas@1', which the evaluation does not report; it reports eval/pass@1\. Did you mean 'pass@1'"
    with pytest.raises(ConfigError, match=message):
        BestTracker("pas@1").update(1, {"eval/pass@1": 0.5, "loss": 1.0})
    with pytest.raises(ConfigError, match=r"neither pass@1, a reward nor a loss; set eval\.metric to .*eval/length"):
        BestTracker().update(1, {"eval/length": 3.0})
    with pytest.raises(ConfigError, match=r"eval\.mode is 'up'; allowed"):
        BestTracker("a", "up")
    with pytest.raises(ConfigError, match=r"eval\.patience is 0; allowed"):
        BestTracker("a", patience=0)
