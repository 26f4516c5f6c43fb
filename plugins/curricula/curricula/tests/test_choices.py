"""What each curriculum chooses, against numbers computed by hand."""

from __future__ import annotations

import json
import math

import pytest
from pydantic import ValidationError
from rlhf.errors import ConfigError, DataError
from rlhf.interfaces import FinishedGroup
from rlhf_plugin_curricula import AdaptiveMixing, EasyToHard, PassRate
from rlhf_plugin_curricula.adaptive_mixing import gain
from rlhf_plugin_curricula.arrays import from_text, to_text
from rlhf_testing.curriculum import MadeUpRows


def group(row: int, *scores: float, number: int = 0) -> FinishedGroup:
    return FinishedGroup(row, number, 0, scores, "kept")


# ------------------------------------------------------------------------------------------ pass_rate


def pass_rate(rows: int, **options: float) -> PassRate:
    curriculum = PassRate(PassRate.Config(**{"explore": 0.0, "memory": 1.0, **options}))
    curriculum.setup(MadeUpRows({"a": rows}, shuffled=False), 0, 10)
    return curriculum


def test_rows_of_the_band_come_first_the_one_first_that_was_chosen_longest_ago():
    curriculum = pass_rate(6, low=0.2, high=0.8)
    assert curriculum.choose(4, 0) == [0, 1, 2, 3]
    curriculum.finished([group(0, 1, 1), group(1, 1, 0), group(2, 0, 0), group(3, 0, 1)])  # rates 1, 1/2, 0, 1/2
    assert curriculum.choose(3, 1) == [1, 3, 4], "the band, then a row that has not come"
    assert curriculum.metrics() == {"from_band": 2 / 3, "from_unseen": 1 / 3, "rows_in_band": 2.0}
    assert curriculum.choose(4, 2) == [1, 3, 5, 0], (
        "the band, the last unseen row, then outside: row 0 was chosen longest ago"
    )


def test_the_band_is_open_at_both_ends():
    curriculum = pass_rate(4, low=0.25, high=0.75)
    curriculum.choose(4, 0)
    curriculum.finished([group(0, 1, 0, 0, 0), group(1, 1, 1, 1, 0), group(2, 1, 1, 0, 0)])  # 1/4, 3/4, 1/2
    assert curriculum.choose(1, 1) == [2]


def test_a_sample_passes_at_the_threshold():
    curriculum = pass_rate(3, pass_threshold=0.5)
    curriculum.choose(3, 0)
    curriculum.finished([group(0, 0.5, 0.5), group(1, 0.5, 0.49), group(2, 0.4, 0.3)])  # 1, 1/2, 0
    assert curriculum.choose(1, 1) == [1]


@pytest.mark.parametrize(("memory", "rate"), [(1.0, 3 / 4), (0.5, 5 / 6), (0.0, 1.0)])
def test_earlier_samples_weigh_as_much_as_memory_says(memory, rate):
    """1 of 2 passed, and later 2 of 2: (m + 2) / (2 m + 2)."""
    for high in (rate - 1e-9, rate + 1e-9):
        curriculum = pass_rate(2, low=0.1, high=min(1.0, high), memory=memory)
        curriculum.choose(1, 0)
        curriculum.finished([group(0, 1, 0)])
        curriculum.choose(1, 1)
        curriculum.finished([group(0, 1, 1)])
        assert curriculum.metrics()["rows_in_band"] == float(rate < min(1.0, high))


def test_a_row_without_scores_stays_as_it_was():
    curriculum = pass_rate(3)
    curriculum.choose(2, 0)
    curriculum.finished([group(0), group(1, 1, 0)])
    assert curriculum.choose(3, 1) == [1, 2, 0]


def test_a_row_comes_twice_in_a_batch_only_where_the_batch_holds_all():
    curriculum = pass_rate(3)
    assert curriculum.choose(2, 0) == [0, 1]
    assert curriculum.choose(3, 0) == [2, 0, 1], "a refill of the same batch: row 2 was left"
    assert curriculum.choose(3, 1) == [2, 0, 1], "another batch"


def test_all_draws_explore_where_explore_is_1():
    curriculum = pass_rate(4, explore=1.0)
    assert curriculum.choose(2, 0) == [0, 1]
    curriculum.finished([group(0, 1, 0), group(1, 0, 0)])
    assert curriculum.choose(2, 1) == [2, 3], "unseen before the band"
    assert curriculum.choose(3, 2) == [1, 2, 3], "outside before the band"


def test_the_share_of_draws_that_explore():
    curriculum = PassRate(PassRate.Config(explore=0.25))
    curriculum.setup(MadeUpRows({"a": 5000}), 0, 10)
    curriculum.choose(1000, 0)
    curriculum.finished([group(row, 1, 0) for row in range(5000)])
    curriculum.choose(1000, 1)
    assert 0.2 < curriculum.metrics()["from_unseen"] < 0.3


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0.8, 0.2)])
def test_a_band_without_room_is_refused(low, high):
    with pytest.raises(ValidationError, match=f"the band is empty: low = {low:g} must be below high = {high:g}"):
        PassRate.Config(low=low, high=high)


# --------------------------------------------------------------------------------------- easy_to_hard


def easy_to_hard(levels: list, steps: int = 4, sizes: dict | None = None, **options) -> EasyToHard:
    curriculum = EasyToHard(EasyToHard.Config(**{"column": "level", "start": 0.5, "until": 1.0, **options}))
    curriculum.setup(MadeUpRows(sizes or {"a": len(levels)}, {"level": levels}, shuffled=False), 0, steps)
    return curriculum


def test_the_easiest_rows_come_first_and_more_of_them_step_by_step():
    curriculum = easy_to_hard([8, 3, 5, 1, 2, 7, 6, 4])  # of 8 rows 4, 5, 6 and 7 may come at steps 0 to 3
    assert curriculum.choose(2, 0) == [1, 3]
    assert curriculum.metrics() == {"share_allowed": 0.5}
    assert curriculum.choose(3, 1) == [2, 4, 7], "what is left of the easiest 4 and of level 5, which joins the pass"
    assert curriculum.choose(2, 2) == [6, 1], "level 6 ends the pass; the next one begins"
    assert curriculum.choose(7, 3) == [2, 3, 4, 5, 6, 7, 1], "level 8 is not let in before step 4"


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("linear", [0.2, 0.6, 1.0, 1.0]),
        ("root", [0.2, math.sqrt(0.04 + 0.96 / 2), 1.0, 1.0]),
    ],
)
def test_the_schedule(schedule, shares):
    curriculum = easy_to_hard([1, 2], steps=4, start=0.2, until=0.5, schedule=schedule)
    assert [curriculum.share(step) for step in range(4)] == pytest.approx(shares, abs=1e-12)
    assert curriculum.share(100) == 1.0, "a run that is resumed for more steps"


def test_smaller_numbers_can_be_harder_and_ties_keep_the_order_of_the_data():
    assert easy_to_hard([0.1, 0.9, 0.5, 0.7], harder="smaller").choose(2, 0) == [1, 3]
    assert easy_to_hard([2, 1] * 10, start=0.25).choose(5, 0) == [1, 3, 5, 7, 9]


def test_an_unknown_column_is_refused():
    with pytest.raises(ConfigError) as error:
        easy_to_hard([1], column="lvel")
    assert str(error.value) == (
        "curriculum.column = 'lvel': the data source 'a' has no such column; it has level. Did you mean 'level'? Name "
        "the column that says how hard a row is."
    )


@pytest.mark.parametrize("value", ["3", None, True, math.nan, math.inf, [1]])
def test_a_column_with_something_else_than_a_number_is_refused(value):
    with pytest.raises(DataError, match=r"made up, row 1: the column 'level' .* a finite number is expected, got "):
        easy_to_hard([1, value])


# ------------------------------------------------------------------------------------ adaptive_mixing


def mixing(sizes: dict[str, int], probabilities: tuple = (), **options: float) -> AdaptiveMixing:
    curriculum = AdaptiveMixing(AdaptiveMixing.Config(**{"rate": 0.5, "temperature": 0.5, "min_share": 0.0, **options}))
    curriculum.setup(MadeUpRows(sizes, shuffled=False, probabilities=probabilities), 0, 10)
    return curriculum


@pytest.mark.parametrize(
    ("scores", "value"),
    [
        ((1, 1, 1), 0.0),
        ((0.1, 0.1, 0.1), 0.0),
        ((0, 1), 1.0),
        ((1, 0, 0, 0), 2 * math.sqrt(0.25 * 0.75)),
        ((0, 3, 6), 2 / 3 / math.sqrt(2 / 3)),
        ((0, 1e-200), 1.0),
    ],
)
def test_the_gain_is_the_mean_absolute_advantage(scores, value):
    assert gain(scores) == pytest.approx(value, abs=1e-12)


def test_shares_follow_the_gains():
    curriculum = mixing({"one": 4, "two": 4})
    assert curriculum.shares() == {"one": 0.5, "two": 0.5}
    curriculum.finished(
        [group(0, 1, 0), group(1, 1, 1), group(4, 0, 0), group(5, 1)]
    )  # gains 1/2 and 0; one score is none
    assert curriculum.metrics()["value/one"] == 0.25
    weight = math.exp(0.25 / 0.5)
    assert curriculum.shares() == pytest.approx({"one": weight / (weight + 1), "two": 1 / (weight + 1)})
    curriculum.finished([group(0, 1, 0)])
    assert curriculum.metrics()["value/one"] == 0.5 * 1 + 0.5 * 0.25
    assert curriculum.metrics()["value/two"] == 0.0, "it had no rows in the batch"


def test_shares_begin_at_the_probabilities_of_the_run_file():
    assert mixing({"one": 4, "two": 4}, (0.25, 0.75)).shares() == pytest.approx({"one": 0.25, "two": 0.75})


def test_no_source_falls_below_its_least_share():
    curriculum = mixing({"one": 4, "two": 4}, temperature=0.01, min_share=0.1)
    curriculum.finished([group(0, 1, 0)])
    assert curriculum.shares() == pytest.approx({"one": 0.9, "two": 0.1})


def test_rows_are_drawn_by_the_shares_and_each_source_is_passed_through():
    curriculum = mixing({"one": 3, "two": 5}, (0.75, 0.25))
    rows = curriculum.choose(2000, 0)
    assert 0.7 < sum(row < 3 for row in rows) / 2000 < 0.8
    assert [row for row in rows if row < 3][:6] == [0, 1, 2, 0, 1, 2]
    assert [row for row in rows if row >= 3][:6] == [3, 4, 5, 6, 7, 3]


def test_one_source_and_too_large_a_least_share_are_refused():
    with pytest.raises(ConfigError, match=r"data\.train has only one with rows to train on: 'only'\. Add sources, or"):
        mixing({"only": 3})
    with pytest.raises(ConfigError, match=r"min_share = 0\.5: 2 sources .* nothing to adapt\. Set it below 0\.5\."):
        mixing({"one": 3, "two": 3}, min_share=0.5)


# --------------------------------------------------------------------------------------------- state


def test_a_batch_that_is_chosen_in_parts_is_the_same_after_a_resume_between_them():
    """A continuous stream saves at any moment, also where a batch has a part of its rows."""

    def begun() -> PassRate:
        curriculum = pass_rate(4)
        curriculum.choose(4, 0)
        curriculum.finished([group(row, *scores) for row, scores in enumerate([(1, 0), (1, 0), (0, 0), (0, 0)])])
        assert curriculum.choose(2, 1) == [0, 1], "the band"
        return curriculum

    reference, stopped, fresh = begun(), begun(), pass_rate(4)
    fresh.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert reference.choose(2, 1) == fresh.choose(2, 1) == [2, 3], "no row of the band twice in a batch"
    assert fresh.metrics() == reference.metrics() == {"from_band": 0.5, "from_unseen": 0.0, "rows_in_band": 2.0}


def test_state_of_other_data_is_refused():
    for source, other in (
        (pass_rate(3), pass_rate(4)),
        (easy_to_hard([1, 2, 3]), easy_to_hard([1, 2, 3, 4])),
        (mixing({"a": 1, "b": 1}), mixing({"a": 1, "c": 1})),
    ):
        with pytest.raises(ValueError, match=r"values were saved, but the data has 4 rows|belongs to the sources"):
            other.load_state_dict(source.state_dict())


def test_arrays_come_back_bit_for_bit():
    import numpy as np

    for array in (np.array([0.1, -2.5]), np.array([3, -1], np.int64), np.array([1, 0], np.uint8)):
        copy = from_text(to_text(array), np.zeros_like(array))
        assert copy.dtype == array.dtype
        assert copy.tolist() == array.tolist()
