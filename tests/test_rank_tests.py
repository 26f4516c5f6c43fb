"""Which cases ranks run, which tests read them, and what the comparison of steps finds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rlhf_testing.contract import Nonconformance

from tests.support.rank_case import RankCases
from tests.support.rank_tests import RankTests, reads
from tests.support.trainer_rank_checks import check_steps


class Base(RankCases):
    @classmethod
    def values(cls, parameter, case):
        return () if case == "never" else ("a", "b")

    def case_last(self, layout): ...

    def case_never(self, layout): ...


class Own(Base):
    def case_alone(self): ...


class Reading(RankTests):
    cases = Own

    @reads("last")
    def test_last(self, ranks, layout): ...

    @reads("never")
    def test_never(self, ranks, layout): ...


def test_cases_run_for_each_value_those_of_a_subclass_first():
    assert list(Own.names()) == ["alone", "last-a", "last-b"]
    assert Own.names()["last-b"] == ("last", {"layout": "b"})


def test_a_test_whose_case_has_no_runs_is_left_out():
    assert Reading.test_never is None
    assert Reading.test_last is not None


WANT = [({"loss": (3.0, 1.0)}, SimpleNamespace(grad_norm=2.0, lr=0.1))] * 2


def test_equal_steps_pass():
    check_steps([[[1.0, 2.0, 0.1, ""]] * 2, [[2.0, 2.0, 0.1, ""]] * 2], WANT)
    check_steps([[[3.0, 2.0, 0.1, ""]] * 2] * 2, WANT, share=2)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([2.1, 2.0, 0.1, ""], "the sum of the losses"),
        ([2.0, 2.1, 0.1, ""], "the norm on each rank"),
        ([2.0, 2.0, 0.2, ""], "the learning rate on each rank"),
        ([2.0, 2.0, 0.1, "why"], "the reason of a skip on each rank"),
    ],
)
def test_steps_that_differ_are_found(second, message):
    with pytest.raises(Nonconformance, match=message):
        check_steps([[[1.0, 2.0, 0.1, ""]] * 2, [second] * 2], WANT)
    with pytest.raises(Nonconformance, match="steps of each rank"):
        check_steps([[[1.0, 2.0, 0.1, ""]], [[2.0, 2.0, 0.1, ""]]], WANT)
