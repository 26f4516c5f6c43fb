"""Curves: dots where the values are, gaps where they are not finite."""

import math

from rich.console import Console
from rlhf_cli.runs.curves import Curve, draw, number


def rows(picture):
    """The dots of each row, without axis and labels."""
    return [line.partition("│")[2] for line in picture.plain.split("\n")[:-1]]


def test_a_line_goes_from_the_lower_left_to_the_upper_right():
    picture = draw([Curve("a", [(1, 0.0), (8, 7.0)])], colour=False, width=4, height=2)
    assert rows(picture) == ["  ⡠⠊", "⡠⠊  "]
    assert picture.plain.split("\n")[-1].startswith("   step 1")
    assert picture.plain.split("\n")[0].startswith("7 │")
    assert picture.plain.split("\n")[1].startswith("0 │")


def test_many_steps_are_averaged():
    noisy = [(step, float(step % 2)) for step in range(10_000)]
    assert set("".join(rows(draw([Curve("a", [*noisy, (10_000, 2.0)])], False, 10, 3)))) > {" "}
    picture = rows(draw([Curve("a", [*noisy, (9_999, 1.0)])], colour=False, width=10, height=3))
    assert set(picture[0]) == {" "}  # means are about 0.5: neither the top nor the bottom is reached
    assert set(picture[2]) == {" "}


def test_values_that_are_not_finite_leave_no_dots():
    points = [(1, 0.0), (2, 1.0), (3, 2.0)]
    broken = [(1, 0.0), (2, math.nan), (3, 2.0)]
    assert draw([Curve("a", broken)], False).plain == draw([Curve("a", [points[0], points[2]])], False).plain
    assert draw([Curve("a", [(1, math.inf)])], False).plain == ""
    assert not Curve("a", [(1, 1.0), (2, math.nan), (3, 1.0)]).varies


def test_two_curves_have_the_same_axes():
    low, high = Curve("low", [(1, 0.0), (2, 1.0)]), Curve("high", [(1, 5.0), (4, 9.0)])
    text = draw([low, high], colour=False, width=6, height=2).plain
    assert text.count("9 │") == text.count("0 │") == 2
    assert [line for line in text.split("\n") if line in ("low", "high")] == ["low", "high"]
    coloured = draw([low, high], colour=True, width=6, height=2)
    assert coloured.plain.count("│") == 2
    assert {str(span.style) for span in coloured.spans} >= {"cyan", "magenta"}


def test_a_curve_beside_one_without_values_keeps_its_name():
    chart = draw([Curve("one", []), Curve("two", [(1, 1.0), (2, 2.0)])], colour=False)
    assert chart.plain.startswith("two\n")


def test_a_curve_can_be_printed():
    console = Console(width=80, record=True, quiet=True)
    console.print(draw([Curve("a", [(1, 1.0)])], colour=True))


def test_whole_numbers_are_shown_in_full():
    """A count of 12,345 prompts is not 1.234e+04."""
    values = (12345.0, -200000, 0.0, 0.123456, 12345.6, 1e12, math.nan)
    assert [number(v) for v in values] == ["12345", "-200000", "0", "0.1235", "1.235e+04", "1e+12", "nan"]
