"""A row of data, as rewards and environments read it."""

from rlhf.types import Row


def test_a_row_says_which_columns_it_has():
    row = Row({"answer": "3", "reward_model": {"ground_truth": "3"}}, "data", 0)
    assert "answer" in row
    assert "reward_model.ground_truth" in row
    assert "label" not in row
