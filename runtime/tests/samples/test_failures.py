"""Failed samples are counted, the first of each cause is reported, and too large a share stops the run."""

import tracemalloc

import pytest
from rlhf.errors import RolloutError
from rlhf.types import Row, Trajectory
from rlhf_runtime.samples.failures import CAUSES, WINDOW, Failures


def drawn(failures: Failures, *causes: str) -> None:
    """One call with one sample per cause, in this order; an empty cause is a sample that did not fail."""
    failures.expect(len(causes))
    add(failures, *causes)


def add(failures: Failures, *causes: str) -> None:
    for number, cause in enumerate(causes):
        sample = Trajectory(Row({}, "unit", number), [], (0, number))
        if cause:
            sample.status, sample.error = "failed", cause
        failures.add(sample)


def test_the_first_failure_of_each_cause_is_noted_and_all_are_counted():
    notes: list[str] = []
    failures = Failures(0.5, notes.append)
    drawn(failures, "", "", "no answer in 3 s:\nits output\nKeyError: 7", *[""] * 17)
    assert failures.by_cause() == "", "one cause, which is noted"
    drawn(failures, "no answer in 12.5 s:\nKeyError: 8", "no answer in 3 s:\nOSError", *[""] * 18)
    first, second = notes
    assert first.startswith("sample 2 of row 2 of 'unit' failed: no answer in 3 s:\nits output\nKeyError: 7\nA")
    assert "a share of more than 0.5 fails (stream.max_failed)" in first
    assert second == "sample 1 of row 1 of 'unit' failed: no answer in 3 s:\nOSError"
    assert str(failures) == "3 of 40 samples failed (7.5 %)"
    assert failures.by_cause().splitlines()[1:] == [
        "  2: no answer in N s: ... KeyError: N",
        "  1: no answer in N s: ... OSError",
    ]


def test_causes_that_are_all_different_are_not_noted_without_end():
    notes: list[str] = []
    failures = Failures(1.0, notes.append)
    drawn(failures, *[f"bad answer {'x' * n}" for n in range(CAUSES + 5)])
    assert len(notes) == CAUSES + 1, "the last is about the share"
    assert failures.by_cause().splitlines()[1] == "  5: other causes"


def test_a_share_of_failures_above_a_tenth_is_noted_once_with_what_it_does_to_means():
    notes: list[str] = []
    failures = Failures(1.0, notes.append, metric="METRIC")
    drawn(failures, *["down"] * 2, *[""] * 18)
    assert len(notes) == 1, "the first failure only"
    drawn(failures, *["down"] * 60)
    assert len(notes) == 2
    assert "7 of the latest 64 samples failed" in notes[1]
    assert "METRIC" in notes[1]


def test_nothing_is_reported_if_nothing_failed():
    notes: list[str] = []
    failures = Failures(0.0, notes.append)
    drawn(failures, "", "")
    assert (notes, str(failures)) == ([], "")


@pytest.mark.parametrize(("allowed", "goes_on", "stops"), [(0.0, 0, 1), (0.5, 2, 3), (0.99, 3, 4)])
def test_more_failures_than_the_share_stop_the_run(allowed, goes_on, stops):
    def of_four(count: int) -> None:
        drawn(Failures(allowed, lambda note: None), *["down"] * count, *[""] * (4 - count))

    of_four(goes_on)
    with pytest.raises(
        RolloutError, match=rf"{stops} of the latest 4 samples failed, and stream.max_failed = {allowed:g}"
    ):
        of_four(stops)
    drawn(Failures(1.0, lambda note: None), *["down"] * 4)


def test_the_run_stops_as_soon_as_the_share_is_certain_and_not_before():
    """The samples that fail end first. Their share is of all samples drawn, not of those that have ended."""
    failures = Failures(0.5, lambda note: None)
    drawn(failures, *["down"] * 5, *[""] * 5)
    failures = Failures(0.5, lambda note: None)
    with pytest.raises(RolloutError, match="6 of the latest 10"):
        drawn(failures, *["down"] * 10)
    assert failures.sample_count == 6


def test_one_bad_group_in_a_small_batch_does_not_stop_a_run_with_earlier_good_samples():
    failures = Failures(0.5, lambda note: None)
    for _ in range(20):
        drawn(failures, *[""] * 4)
    drawn(failures, *["a bad row"] * 4)
    first_and_last = r"(?s)first of them: .*a bad row\nThe last of them: .*the server"
    with pytest.raises(RolloutError, match=first_and_last) as stopped:
        keep_drawing(failures, "the server is down")
    assert f"of the latest {WINDOW} samples failed" in str(stopped.value)


def keep_drawing(failures: Failures, cause: str) -> None:
    for _ in range(20):
        drawn(failures, *[cause] * 4)


def test_the_share_of_a_large_batch_is_of_that_batch_alone():
    failures = Failures(0.5, lambda note: None)
    drawn(failures, *[""] * 1000)
    with pytest.raises(RolloutError, match="51 of the latest 100 samples"):
        drawn(failures, *["down"] * 100)


def test_the_share_in_an_evaluation_excludes_earlier_evaluations():
    failures = Failures(0.5, lambda note: None, "evaluation sample", "has no reward")
    drawn(failures, *[""] * 30)
    failures.forget()
    with pytest.raises(RolloutError, match="5 of the latest 8 evaluation samples failed"):
        drawn(failures, *["down"] * 8)


def by_groups(failures: Failures, size: int, batch: int, *causes: str) -> None:
    """One sample per cause, announced in groups of ``size``, of which ``batch`` samples are a batch. A group is
    announced when the one before it has ended."""
    for start in range(0, len(causes), size):
        failures.expect(size, at_least=batch)
        add(failures, *causes[start : start + size])


def test_groups_that_are_announced_one_by_one_are_judged_as_a_batch():
    """Half of a batch of four samples may fail, in whichever groups."""
    by_groups(Failures(0.5, lambda note: None), 2, 4, "down", "down", "", "")
    failures = Failures(0.5, lambda note: None)
    with pytest.raises(RolloutError, match="3 of the latest 4 samples failed"):
        by_groups(failures, 2, 4, "down", "down", "down", "")
    assert failures.sample_count == 3


def test_the_share_of_a_batch_beyond_the_window_includes_its_earlier_groups():
    failures = Failures(0.5, lambda note: None)
    with pytest.raises(RolloutError, match="101 of the latest 200 samples failed"):
        by_groups(failures, 10, 200, *[""] * 100, *["down"] * 110)
    assert failures.sample_count == 201


def test_failures_of_groups_that_are_under_way_at_once_do_not_add_up():
    """Three batches of four samples are announced before the first sample ends. One sample of each fails, which is
    never more than 2 of the latest 4."""
    failures = Failures(0.5, lambda note: None)
    for _ in range(6):
        failures.expect(2, at_least=4)
    add(failures, *["down", "", "", ""] * 3)
    assert (failures.failed, failures.sample_count) == (3, 12)


def test_a_sample_of_a_large_batch_costs_as_much_as_one_of_a_small_batch():
    """Work for all samples of the batch at each of them would take minutes for some 100,000 samples."""
    count = 20_000
    failures = Failures(1.0, lambda note: None)
    failures.expect(count)
    sample = Trajectory(Row({}, "unit", 0), [], (0, 0), status="failed", error="down")
    for _ in range(count // 2):
        failures.add(sample)
    tracemalloc.start()
    try:
        failures.add(sample)
        assert tracemalloc.get_traced_memory()[1] < count
    finally:
        tracemalloc.stop()
