"""The math reward: extraction, equivalence, guards, and agreement with labelled solutions."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from pydantic import ValidationError
from rlhf.errors import RewardError
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf_plugin_math import MathReward
from rlhf_plugin_math.equivalence import equivalent
from rlhf_plugin_math.extraction import extract_answer
from rlhf_plugin_math.normalise import normalise

from tests.support.scoring import score_groups

ALL = ("boxed", "hash", "tag", "answer_is", "last_number")


def group(*answers: str, **columns) -> Group:
    row = Row(columns, "unit", 3)
    turns = [[Turn([1], False, text="Q"), Turn([2], True, text=a)] for a in answers]
    return Group(row, 0, [Trajectory(row, t, (0, i)) for i, t in enumerate(turns)])


def values(config: dict, *answers: str, **columns) -> list[float | None]:
    return [r.value for r in MathReward(MathReward.Config(**config)).score(group(*answers, **columns))]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{4} and then \boxed{5", "4"),
        (r"nested \boxed{\text{a {b} c}} end", r"\text{a {b} c}"),
        ("He has 5+3 = 8.\n#### 1,234\nThanks!", "1,234"),
        ("The answer is 42.", "42"),
        ("The final answer is: **42 apples**.", "42"),
        ("the answer is 5 because 2+3=5.", "5"),
        ("Answer: x = 7", "x = 7"),
        ("work 3*4=12\nA: 12", "12"),
        ("Q: 1+1\nA: 2\nQ: 2+2\nA: 4", "4"),
        ("First 12, then $1,250.50", "$1,250.50"),
        ("16-3=13", "13"),
        ("7-12", "12"),
        ("it is -4", "-4"),
        ("about 3/4 of it", "3/4"),
        ("thus 25%", "25%"),
        ("it costs 3.50.", "3.50"),
        ("no number here", None),
        ("", None),
        (r"\boxed{}", None),
        (r"so \fbox{5} of 6", "5"),
        ("about ½ of it", "½"),
        ("so -2½ or so", "-2½"),
        ("it is 1_000 then", "1_000"),
        ("The answer is 5!", "5"),
        ("#### 5!", "5"),
        (r"\boxed{5!}", "5!"),
        (r"so \box{5} of 6", "5"),
        (r"so $\boxed 7$ of 12", "7"),
        ("####: 55", "55"),
        (r"Final Answer: The final answer is $\frac{\pi}{6}$. I hope it is correct.", r"$\frac{\pi}{6}$"),
        ("**Final Answer:**\n\nThe answer is: $14{,}916$", "$14{,}916$"),
        ("<answer>1</answer> no, <answer> x + 1 </answer> and 7", "x + 1"),
        ("<answer>5 or 4", "4"),
    ],
)
def test_extraction(text: str, answer: str | None) -> None:
    assert extract_answer(text, ALL) == answer


def test_places_are_an_order_and_a_restriction() -> None:
    text = "#### 5 and 7"
    assert extract_answer(text, ("last_number", "hash")) == "7"
    assert extract_answer(text, ("boxed",)) is None


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("72", "72"), ("72.0", "72"), ("072", "72"), ("1,234,567", "1234567"), ("1{,}000", "1000"), ("$18", "18"),
        (r"\$18.00", "18"), ("18 dollars", "18"), ("18.", "18"), ("**18**", "18"), ("-0", "0"), (".5", "0.5"),
        ("1/2", "0.5"), (r"\frac{1}{2}", "1/2"), (r"\dfrac12", "0.5"), (r"-\frac{3}{4}", "-0.75"), ("2/4", "1/2"),
        ("1 1/2", "1.5"), (r"1\frac{1}{2}", "3/2"), ("-2 1/4", "-2.25"), ("50%", "50"), ("50%", "0.5"),
        ("0.5", "50%"), ("5 km/h", "5"), (r"5\text{ cm}^2", "5"), ("5 cm^2", "5"), ("90^\\circ", "90"), ("90°", "90"),
        (r"50\%", "1/2"), ("7 m", "7"), ("x = 7", "7"), ("x=7", "x = 7"), (r"\(7\)", "7"), ("$7$", "7"), ("3e2", "300"),
        (r"1.5 \times 10^3", "1500"), ("−5", "-5"), ("(C)", "C"), (r"\text{Monday}", "monday"), ("(7)", "7"),
        ("(1, 2)", "(1,2)"), (r"\left(1,\frac12\right)", "(1, 0.5)"), ("[0,1)", "[0, 1)"), (r"\{2, 1\}", r"\{1,2\}"),
        ("2, 1", "1, 2"), ("2x+1", "1+2x"), ("2(x+1)", "2x + 2"), ("(x+1)^2", "x^2+2x+1"), (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"), (r"2\pi", r"\pi \cdot 2"), ("3pi/6", r"\frac{\pi}{2}"),
        (r"\sqrt[3]{8}", "2"), ("2^{10}", "1024"), (r"\frac{x^2-1}{x-1}", "x+1"), ("sin(x)^2+cos(x)^2", "1"),
        ("-x^2", "0-x*x"), ("2^-1", "1/2"), ("|x|", r"\sqrt{x^2}"), ("x*y/2", "y x / 2"),
        ("½", "1/2"), ("2¾", "2.75"), ("-1 ⅓", r"-\frac{4}{3}"), ("2½ cups", "5/2"), (r"x \in [0,1]", "[0, 1]"),
        ("x ∈ (0, 1)", "(0,1)"), ("5!", "120"), ("3!*2", "12"), (r"\frac{6!}{4!}", "30"), ("(2+1)!", "6"), ("n!", "n!"),
        (r"\binom{5}{2}", "10"), (r"\dbinom52", "10"), (r"{5 \choose 2}", "10"), (r"\binom{n}{2}", "n(n-1)/2"),
        (r"\log_{2}{3}", r"\log_23"), (r"6 \text{ and } 8", "8, 6"), ("9.8 kg m/s^2", "9.8"), ("5 cm3", "5"),
        (r"\binom{2}{3}", "0"), ("1_000", "1000"), (r"1\_000\_000", "1,000,000"), (r"12\,345", "12345"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"0.\overline{3}", "1/3"), (r"-16.1\overline{6}", r"-\frac{97}{6}"), (r".\overline{09}", "1/11"),
        ("1 000", "1000"), (r"12~345", "12,345"), ("1 100/200", "1.5"), ("1, 2 and 3", "1, 2, 3"),
        ("21, 16 or 11", "11, 16, 21"),
    ],
)  # fmt: skip
def test_equal(answer: str, truth: str) -> None:
    assert equivalent(answer, truth)
    assert normalise(normalise(answer)) == normalise(answer)


def test_braces_around_the_number_of_a_percentage() -> None:
    assert all(equivalent(r"-{1,020.5}\%", truth) for truth in ("-1020.5%", r"-10.205", r"-{1020.50} \%"))
    assert not any(equivalent(r"{20}\%", truth) for truth in ("2", r"\frac{1}{20}\%", r"{2}0.5\%"))


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("72", "73"), ("72", "-72"), ("7.2", "72"), ("1/3", "0.333"), ("12", "1 2"), ("50%", "5"), ("50%", "0.5%"),
        ("(1, 2)", "(2, 1)"), ("(0,1)", "[0,1)"), ("(1, 2, 3)", "(1, 2)"), ("1, 1", "1, 2"), ("x", "y"), ("2x", "2"),
        ("2 x", "2"), ("|x|", "x"), (r"\sqrt{x^2}", "x"), ("3 pi", "3"), ("A", "B"), ("1/0", "1/0+1"), ("", "5"),
        ("5", ""), ("apples", "5"), ("x^2", "x^3"), (r"\frac{1}{0}", "0"), ("5 and 6", "5"), ("1,23", "123"),
        ("e^(10^6)", "e^(10^6)+1"), ("sqrt(" + "7" * 250 + ")+1", "sqrt(" + "7" * 250 + ")"), ("x^9", "x^9+1"),
        ("½", "12"), ("5!", "5"), ("5!!", "15"), (r"\binom{5}{2}", "5/2"), ("10_2", "102"), ("1_0000", "10000"),
        ("x_100", "x100"), (r"x \in [0,1]", "(0,1)"), (r"\infty", "i"),
        (r"0.\overline{3}", "0.3"), ("1, 2 and 3", "1, 2"),
        (r"\frac{1}{23}", r"\frac{12}{3}"), (r"\sqrt{2}3", r"\sqrt{23}"), ("x^{2}3", "x^{23}"),
        ("48", r"6 \text{ and } 8"), ("0", r"3 \text{ and } -3"), ("60", r"2\text{ hours } 30\text{ minutes}"),
        ("3", "3 ft 4 in"), ("1", "1 hour 30 minutes"),
    ],
)  # fmt: skip
def test_not_equal(answer: str, truth: str) -> None:
    assert not equivalent(answer, truth)


def test_a_tolerance_is_relative_and_off_by_default() -> None:
    assert equivalent("0.333", "1/3", tolerance=0.01)
    assert not equivalent("0.333", "1/3", tolerance=1e-6)


@pytest.mark.parametrize(
    "bomb",
    [
        "9^9^9^9", "9^{9^{9}}", "(2^9999)^9999", "10^(10^10)", "(" * 500 + "1" + ")" * 500, "-" * 5000 + "1",
        "2^" * 40 + "2", "9" * 100_000, "x" + "^x" * 120, "5 " + "a" * 900 + "!", "1" + ",1" * 20_000,
        "\\boxed{" * 3000, "((((x+1)^50+1)^50+1)^50+y)^50", "1e999", "the answer is " + "a b" * 5000,
        "(2^(1/2))^(10^9)", "(x*sqrt(2))^(10^9)", "(3x)^(10^10)",
        "99999!", "9!!!", "((9!)!)!", "99!" * 80, "\\binom{9}{9999999}", "\\binom{x}{100}" * 20,
        "\\binom{10^2000}{100}", "\\binom{\\binom{\\binom{x}{100}}{100}}{100}", "1_000" * 190,
    ],
)  # fmt: skip
def test_hostile_answers_cost_little(bomb: str) -> None:
    """In other frameworks such answers keep SymPy busy forever, in a thread that no signal can stop."""
    begin = time.process_time()
    assert not equivalent(bomb, "7")
    assert not equivalent(bomb, "x+7")
    extract_answer(bomb, ALL)
    assert time.process_time() - begin < 2.0


def test_an_answer_that_takes_too_long_is_killed_with_its_worker() -> None:
    """Without the size limit the power is computed, and the process is killed at the deadline."""
    bombs, fine = group(r"\boxed{9^9^9}", answer="x"), group("The answer is x.", answer="x")
    score_groups("math", bombs, fine, options={"max_bits": 10**12}, deadline=1.0)
    assert "score() took longer than its deadline of 1 s; its worker process was killed" in bombs.trajectories[0].error
    assert fine.trajectories[0].reward == 1.0


def test_each_outcome_has_its_value() -> None:
    config = {"correct": 1.0, "wrong": -0.5, "no_answer": -1.0}
    assert values(config, "it is 72", "it is 71", "no idea", answer="steps 48+24=72\n#### 72") == [1.0, -0.5, -1.0]
    assert values({}, "72", answer=72) == [1.0]
    assert values({}, "0.5", answer=0.5) == [1.0]
    assert values({}, "72", answer=None) == [None]
    for truth in (["71", 72], '["71", "72"]', "<think>5</think><answer> 72 </answer>", [r"\boxed{72}"]):
        assert values({}, "72", r"\boxed{72}", "71.5", answer=truth) == [1.0, 1.0, 0.0]
    assert values({"column": "target"}, "72", target="72", answer="1") == [1.0]
    assert values({"extract": ("boxed",), "no_answer": -1.0}, "72", r"\boxed{72}", answer="72") == [-1.0, 1.0]


def test_a_missing_column_or_a_wrong_type_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"no column 'answer'; it has \['label'\]. Set `column`"):
        values({}, "72", label="72")
    for truth in ([], [True], [["72"]], {"ground_truth": "72"}, '{"ground_truth": "72"}'):
        with pytest.raises(RewardError, match=r"column 'answer' holds .*; allowed: text or a number, or a"):
            values({}, "72", answer=truth)


def test_a_bad_config_is_refused() -> None:
    with pytest.raises(ValidationError, match="boxed"):
        MathReward.Config(extract=("boxes",))
    with pytest.raises(ValidationError, match="tolerance"):
        MathReward.Config(tolerance=-1.0)


def data_file() -> Path | None:
    places = [Path(p) for p in [os.environ.get("RLHF_DATA", "")] if p]
    places += [p / "shared" / "data" for p in Path(__file__).resolve().parents]
    return next((f for f in (p / "gsm8k_model_solutions.jsonl" for p in places) if f.is_file()), None)


def test_agreement_with_labelled_gsm8k_solutions() -> None:
    """4,000 solutions by four models, each labelled by its authors (openai/grade-school-math)."""
    file = data_file()
    if file is None:
        pytest.skip("gsm8k_model_solutions.jsonl is neither in ../shared/data nor in the folder that RLHF_DATA names")
    agree = total = 0
    for line in file.read_text().splitlines():
        row = json.loads(line)
        solutions = [v for v in row.values() if isinstance(v, dict)]
        graded = values({}, *(s["solution"] for s in solutions), answer=row["ground_truth"])
        for grade, solution in zip(graded, solutions, strict=True):
            agree += (grade == 1.0) == solution["is_correct"]
            total += 1
    print(f"agreement with is_correct: {agree} of {total} = {agree / total:.4f}")
    assert total >= 4000
    assert agree / total >= 0.999


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{1}$ and $\boxed{-2}$.", "1, -2"),
        (r"\boxed{2}, \boxed{3}, \boxed{5}", "2, 3, 5"),
        (r"\[\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}\]", "(2, 2), (6, 2)"),
        (r"$\boxed{5}$, in short $\boxed{5}$", "5"),
        (r"\boxed{5}, \boxed{5}", "5"),
        ("\\boxed{4}\n\n\\boxed{5}", "5"),
        (r"\boxed{4} is wrong, and \boxed{5} is right", "5"),
        (r"\boxed{3} or rather \boxed{4}", "4"),
    ],
)  # fmt: skip
def test_boxes_that_are_joined_are_one_answer(text: str, answer: str) -> None:
    assert extract_answer(text, ALL) == answer


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"5 \geq x", r"x \leq 5"), ("x >= 5", r"x \ge 5"),
        (r"(-\infty, 2) \cup (5, \infty)", r"(5, \infty) \cup (-\infty, 2)"),
        (r"\begin{bmatrix} 1 & 0 \\ 0 & \frac{1}{2} \end{bmatrix}", r"\begin{pmatrix} 1 & 0 \\ 0 & 0.5 \end{pmatrix}"),
        (r"1 \pm \sqrt{2}", r"\{1+\sqrt{2}, 1-\sqrt{2}\}"), (r"y = \frac{1}{2}x + 3", "x - 2y + 6 = 0"),
        (r"-2 \le x \le 7", "[-2,7]"), (r"6 \text{ and } 8", "6, 8"), (r"(x, y) = (3, 2)", "(3,2)"),
    ],
)  # fmt: skip
def test_structures_are_compared_by_math_verify(answer: str, truth: str) -> None:
    assert equivalent(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"x < 5", r"x \leq 5"), (r"5 \leq x", r"x \leq 5"),
        (r"(-\infty, 2) \cup (5, \infty)", r"(-\infty, 2] \cup (5, \infty)"),
        (r"\begin{pmatrix} 1 & 0 \\ 0 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 0 \\ 0 & 3 \end{pmatrix}"),
        (r"1 \pm \sqrt{2}", r"1 \pm \sqrt{3}"), (r"y = 2x + 3", "y = 2x + 4"), (r"(0.333333, 1)", r"(1/3, 1)"),
        (r"x \leq 5", "5"), (r"6 \text{ and } 8", "6"),
        (r"(0.3333333, 1) \cup (2, 3)", r"(\frac{1}{3}, 1) \cup (2, 3)"),
    ],
)  # fmt: skip
def test_structures_that_differ(answer: str, truth: str) -> None:
    assert not equivalent(answer, truth)


@pytest.mark.parametrize(
    "bomb",
    [
        r"x \leq 9^9^9^9", r"(1, 9^{9^{9}}) \cup (2, 3)", r"\begin{pmatrix} (9!)! & 1 \end{pmatrix}",
        r"x \le 10^{10000}",
        r"x = 99999!", r"x \le \binom{99999999}{9999999}", r"((((x+1)^{50}+1)^{50}+1)^{50}+y)^{50} \le 3",
        r"\left" * 40 + r"x \le 2",
        r"x \le \sum_{n=1}^{\infty} \frac{\sin(n)}{n^3+1}", r"x = \int_0^1 \sin(x^x) dx", "x <= 9**9**9**9",
    ],
)  # fmt: skip
def test_hostile_structures_cost_little(bomb: str) -> None:
    begin = time.process_time()
    assert not equivalent(bomb, r"x \leq 5")
    assert time.process_time() - begin < 4.0
