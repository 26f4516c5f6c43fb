import itertools

import pytest
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_runtime.observe.sample_metrics import evaluation_metrics, metric_names, pass_at_k


def group(rewards, source="a", lengths=None, finish="stop", number=0):
    row = Row({}, source, number)
    lengths = lengths or [1] * len(rewards)
    return Group(
        row,
        number,
        [
            Trajectory(
                row,
                [Turn([1], False), Turn([1] * length, True, finish=finish)],
                (number, n),
                reward=reward,
                status="failed" if reward is None else "ok",
            )
            for n, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
        ],
    )


def test_pass_at_k_is_the_share_of_subsets_that_pass():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(2, 3, 1), (2, 1, 3), (2, 1, 0), (0, 0, 1)])
def test_undefined_pass_at_k_is_refused(n, c, k):
    with pytest.raises(ValueError, match="is undefined; needs"):
        pass_at_k(n, c, k)


def test_metrics_by_hand():
    groups = [group([1.0, 0.0, 0.0, 0.0], lengths=[2, 4, 6, 8]), group([1.0, 1.0, 0.5, 0.0], lengths=[1, 1, 1, 1])]
    assert evaluation_metrics(groups, samples=4) == pytest.approx(
        {
            "pass@1": (0.25 + 0.5) / 2,
            "pass@2": (0.5 + (1 - 1 / 6)) / 2,
            "pass@4": 1.0,
            "avg@4": 0.375,
            "reward": (0.25 + 0.625) / 2,
            "length": 3.0,
            "truncated": 0.0,
            "unscored": 0.0,
            "prompts": 2.0,
        }
    )
    assert evaluation_metrics(groups, samples=4, threshold=0.5)["avg@4"] == pytest.approx((0.25 + 0.75) / 2)
    assert "pass@3" in evaluation_metrics([group([1.0, 0.0, 0.0])], samples=3)


def test_answers_with_rewards_of_placed_steps_alone_neither_pass_nor_fail():
    steps = group([0.0, 0.0])
    for trajectory, value in zip(steps.trajectories, (0.5, 0.25), strict=True):
        trajectory.rewards, trajectory.score = {"steps": RewardResult(None, steps=((1, 0, value),))}, value
    metrics = evaluation_metrics([steps], samples=2)
    assert (metrics["score"], metrics["reward"]) == (0.375, 0)
    assert not {"pass@1", "pass@2", "avg@2"} & set(metrics)
    # beside answers to another prompt that have an outcome, only those count
    assert evaluation_metrics([steps, group([1.0, 0.0], number=1)], samples=2)["pass@1"] == 0.5
    # the same steps with an outcome, or as part of the reward
    steps.trajectories[0].rewards["outcome"] = RewardResult(0.0)
    assert evaluation_metrics([steps])["pass@1"] == 0
    del steps.trajectories[0].rewards["outcome"]
    steps.trajectories[0].reward, steps.trajectories[1].reward = 0.5, 0.25
    assert evaluation_metrics([steps], threshold=0.5)["pass@1"] == 0.5


def test_scores_of_their_own_are_reported_beside_rewards():
    scored = group([0.0, 1.0, None])
    scored.trajectories[0].score = 0.75  # e.g. of steps whose values are at their tokens
    metrics = evaluation_metrics([scored, group([1.0])])
    assert (metrics["reward"], metrics["score"]) == ((0.5 + 1.0) / 2, (0.875 + 1.0) / 2)
    scored.trajectories[0].score = 0.0
    assert "score" not in evaluation_metrics([scored])


def test_metrics_are_also_reported_per_source():
    metrics = evaluation_metrics([group([1.0], "gsm"), group([0.0], "gsm"), group([0.0], "code", finish="length")])
    assert metrics["pass@1"] == pytest.approx(1 / 3)
    assert metrics["gsm/pass@1"] == 0.5
    assert metrics["code/pass@1"] == 0.0
    assert metrics["code/truncated"] == 1.0
    assert metrics["truncated"] == pytest.approx(1 / 3)
    assert "avg@1" not in metrics
    assert "a/pass@1" not in evaluation_metrics([group([1.0])])  # one source: said once


def test_a_failed_answer_does_not_count_as_wrong():
    metrics = evaluation_metrics([group([1.0, None]), group([None, None])], samples=2)
    assert metrics["pass@1"] == 1.0
    assert metrics["unscored"] == 0.75
    assert "pass@2" not in metrics  # no prompt has two scored answers
    assert metrics["prompts"] == 2.0
    assert "reward" not in evaluation_metrics([group([None])])


def test_a_sample_that_failed_before_it_was_written_has_no_length():
    answers = group([1.0, None, 0.0], lengths=[4, 2, 8])  # the second failed when it was scored: it has a length
    answers.trajectories.append(Trajectory(answers.row, [], (0, 3), status="failed"))
    metrics = evaluation_metrics([answers], samples=4)
    assert metrics["length"] == pytest.approx((4 + 2 + 8) / 3)
    assert metrics["unscored"] == 0.5
    answers.trajectories = answers.trajectories[3:]
    assert not {"length", "truncated"} & set(evaluation_metrics([answers], samples=4))


def test_without_a_threshold_no_answer_passes_or_fails():
    groups = [group([0.0, 2.5]), group([-1.0, None])]
    bare = evaluation_metrics(groups, 2, None)
    assert bare == {k: v for k, v in evaluation_metrics(groups, 2, 1.0).items() if "@" not in k}
    assert bare["reward"] == 0.125
    names = metric_names(2, [], True, passes=False)
    assert "reward" in names
    assert not any("@" in name for name in names)


def test_nothing_to_evaluate():
    assert evaluation_metrics([]) == {"prompts": 0.0}


def test_a_prompt_counts_once_for_each_agent():
    """x wins the first of two games, y the second and a third, in which x had no turn."""
    games = group([1.0, -1.0, -1.0, 1.0, 1.0])
    for t, (agent, sample) in zip(games.trajectories, [("x", 0), ("x", 1), ("y", 0), ("y", 1), ("y", 2)], strict=True):
        t.turns[0].agent, t.index, t.score = agent, (0, sample), t.reward
    metrics = evaluation_metrics([games], samples=3)
    assert metrics["pass@1"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert metrics["reward"] == pytest.approx((0 + 1 / 3) / 2)
    assert (metrics["agent/x/score"], metrics["agent/y/score"]) == pytest.approx((0.0, 1 / 3))
    assert metrics["prompts"] == 1.0
