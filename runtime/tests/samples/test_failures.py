"""Failed samples are counted, the first is reported with its cause, and too large a share stops the run."""

import pytest
from rlhf.errors import RolloutError
from rlhf.types import Row, Trajectory
from rlhf_runtime.samples.failures import WINDOW, Failures


def drawn(failures: Failures, *causes: str) -> None:
    """One call with one sample per cause, in this order; an empty cause is a sample that did not fail."""
    failures.expect(len(causes))
    for number, cause in enumerate(causes):
        sample = Trajectory(Row({}, "unit", number), [], (0, number))
        if cause:
            sample.status, sample.error = "failed", cause
        failures.add(sample)


def test_the_first_failure_is_noted_once_and_all_are_counted():
    notes: list[str] = []
    failures = Failures(0.5, notes.append)
    drawn(failures, "", "", "the server is down", "another", "")
    (note,) = notes
    assert note.startswith("sample 2 of row 2 of 'unit' failed: the server is down\n")
    assert "a share of more than 0.5 fails (stream.max_failed)" in note
    assert str(failures) == "2 of 5 samples failed (40 %)"


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
    assert failures.drawn == 6


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
