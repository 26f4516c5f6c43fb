from rlhf.types import Group, RewardResult, Row, Trajectory
from rlhf_cli.jobs.score_answers import ScoreTotals


def test_the_score_of_an_answer_is_its_value_and_its_steps_together():
    row = Row({}, "rows", 0)
    results = [
        {"prm": RewardResult(1.0, steps=((0, 1, 0.25), (0, 3, 0.5))), "math": RewardResult(2.0)},
        {"prm": RewardResult(None, steps=((0, 2, 0.25),)), "math": RewardResult(None)},
    ]
    scores = ScoreTotals()
    scores.add([Group(row, 0, [Trajectory(row, [], (0, n), rewards=rewards) for n, rewards in enumerate(results)])])
    assert (scores.rows, scores.answers) == (1, 2)
    assert scores.sums == {"prm": [2.0, 2], "math": [2.0, 1]}
    assert (scores.mean("prm"), scores.mean("math"), scores.mean("format")) == (1.0, 2.0, None)
