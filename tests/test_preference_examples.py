"""The examples of preferences: every run file on the real data at a small size, and the preparation on rows by hand."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from rlhf_cli.main import main as rlhf

from examples.preferences import marks, prepare, run, solutions, steps

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("RLHF_DATA") or ROOT.parent / "shared" / "data")
FILES = tuple(prepare.FILES.values())


# ------------------------------------------------------------------------------------------- marks


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("48/2", 24),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("20-3-4", 13),
        ("48/4/2", 6),
        ("-3+5", 2),
        ("2*-3", -6),
        ("1,200 + 34", 1234),
        (".5*3.", Fraction(3, 2)),
        ("1/3", Fraction(1, 3)),
        ("((7))", 7),
    ],
)
def test_expressions_have_their_exact_value(expression, value):
    assert marks.evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "x+1", "2(3)", "5%", "7//2", "2**9", "1/0", "(1", "1)", "1 2", "1,23", "9" + "(" * 60, "__import__"],
)
def test_texts_that_are_not_arithmetic_are_refused(expression):
    with pytest.raises(marks.Unreadable):
        marks.evaluate(expression)


@pytest.mark.parametrize(
    ("mark", "verdict"),
    [
        ("48/2=24", True),
        ("48/2=25", False),
        ("100/3=33.33", True),
        ("2/3=0.66", True),
        ("2/3=0.67", True),
        ("2/3=0.68", False),
        ("50/3=17", False),
        ("4.20+9.45+1.35=14.999999999999998", True),
        ("20-26=-6", True),
        ("10,000-4000=6,000", True),
        ("x-19.5=19.5", None),
        ("3/4=3/4", None),
        ("4=2+2=4", None),
        ("83.3", None),
    ],
)
def test_marks_are_right_wrong_or_neither(mark, verdict):
    assert marks.is_right(mark) is verdict


# ------------------------------------------------------------------------------------------- steps

WORKED = "First she thinks.\nShe has 48/2 = <<48/2=24>>24 clips.\n\nThen 48+24 = $<<48+24=72>>72.00 in all.\n#### 72"


def test_a_step_is_a_line_with_a_mark_and_the_lines_before_it():
    assert steps.split(WORKED) == [
        "First she thinks. She has 48/2 = <<48/2=24>>24 clips.",
        "Then 48+24 = $<<48+24=72>>72.00 in all.",
    ]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("<<48/2=24>>24 clips", True),
        ("<<48/2=24>>", True),
        ("<<48/2=25>>25 clips", False),
        ("<<48/2=24>>26 clips", False),
        ("<<1+1=2>>2 and <<2+2=5>>5", False),
        ("<<130000*.15=19500.0>>195,000", False),
        ("<<60/3=20.0>>20 meters", True),
        ("<<200/3=66.66666666666667>>66 guesses", None),
        ("<<160-240=-80>>80 less", None),
        ("<<x+56=86>>86", None),
    ],
)
def test_a_step_is_right_if_its_marks_and_its_numbers_are(step, expected):
    assert steps.label(step) is expected


@pytest.mark.parametrize(
    "step", ["a <<48/2=24>>24 b", "$<<2*600=1200>>1,200, then", "<<1/4=.25>>0.25.", "<<9-2=7.0>>7"]
)
def test_corrupting_changes_one_digit_of_a_result_and_nothing_else(step):
    right = steps.CALCULATOR_MARK.sub("", step)
    wrong = {steps.CALCULATOR_MARK.sub("", steps.corrupted(step, random.Random(i))) for i in range(300)}
    assert len(wrong) > 3
    for text in wrong:
        ((old, new),) = [(a, b) for a, b in zip(right, text, strict=True) if a != b]
        assert old.isdigit()
        assert new.isdigit()
        assert not re.search(r"(?<![\d.,])0[\d,]", text), "no number is written 07"


def test_every_label_follows_from_the_marks(monkeypatch):
    """The rows are made again without removing their marks, and the marks are evaluated."""
    solution = "a {0}*3=<<{0}*3={1}>>{1} b\nc {0}+10=<<{0}+10={2}>>{2}\n#### 1"
    worked = [(f"q{i}", solution.format(i, 3 * i, i + 10)) for i in range(200)]
    counts = steps.Counts()
    examples = list(steps.rows(worked, 0, counts))
    monkeypatch.setattr(steps, "CALCULATOR_MARK", steps.re.compile("never"))
    plain = list(steps.rows(worked, 0, steps.Counts()))
    for row, marked in zip(examples, plain, strict=True):
        assert row["labels"] == marked["labels"]
        for text, step, label in zip(row["completions"], marked["completions"], row["labels"], strict=True):
            assert marks.MARK.sub("", step) == text
            left, _, result = marks.MARK.search(step)[1].partition("=")
            assert (marks.evaluate(left) == marks.evaluate(result)) is label
            assert text.endswith((result, f"{result} b"))
    wrong = sum(row["labels"].count(False) for row in examples)
    assert (counts.rows, counts.steps, counts.wrong, counts.found_wrong) == (200, 400, wrong, 0)
    assert 160 < wrong < 240


def test_corruption_depends_only_on_the_seed_and_the_row():
    worked = [(f"q{i}", WORKED) for i in range(20)]
    first = list(steps.rows(worked, 0, steps.Counts()))
    assert list(steps.rows(worked[::-1], 0, steps.Counts())) == first[::-1]
    assert list(steps.rows(worked, 1, steps.Counts())) != first


def test_solutions_whose_steps_cannot_be_judged_are_left_out_and_counted():
    counts = steps.Counts()
    rows = [("a", "No mark here.\n#### 3"), ("b", "x = <<x+1=3>>3"), ("c", "20+10 = <<20+10=50>>50")]
    examples = list(steps.rows(rows, 0, counts))
    assert examples == [{"question": "c", "completions": ["20+10 = 50"], "labels": [False]}]
    assert counts == steps.Counts(rows=1, steps=1, wrong=1, found_wrong=1, without_marks=1, unreadable=1)


# ------------------------------------------------------------------------------------------- solutions


def graded(*grades: tuple[str, bool]) -> dict:
    answers = {m: {"solution": s, "is_correct": g} for m, (s, g) in zip(solutions.MODELS, grades, strict=True)}
    return {"question": "q", **answers}


FOUR = graded(("1+1=<<1+1=2>>2\nA: 2", True), ("So 3\nA: 3", False), ("Two.\nA: 2", True), ("1+1=2\nA: 2", True))


def test_pairs_are_each_right_solution_with_each_wrong_one():
    assert list(solutions.pairs([FOUR])) == [
        {"question": "q", "chosen": "1+1=2\n#### 2", "rejected": "So 3\n#### 3"},
        {"question": "q", "chosen": "Two.\n#### 2", "rejected": "So 3\n#### 3"},
    ]
    assert not list(solutions.pairs([graded(*[("A", True), ("B", True), ("C", True), ("D", True)])]))


def test_labels_are_each_solution_once():
    assert list(solutions.labels([FOUR])) == [
        {"question": "q", "response": "1+1=2\n#### 2", "label": True},
        {"question": "q", "response": "So 3\n#### 3", "label": False},
        {"question": "q", "response": "Two.\n#### 2", "label": True},
    ]


def test_a_text_that_is_graded_both_ways_is_left_out():
    row = graded(("<<1+1=2>>2", True), ("2", False), ("3", False), ("4", True))
    assert solutions.graded(row) == {"3": False, "4": True}


def test_a_fifth_is_held_out_whatever_the_order():
    assert [i for i in range(12) if solutions.held_out(f"question {i}")] == [6]  # by sha256sum
    assert sum(solutions.held_out(f"question {i}") for i in range(2000)) == 388


# ------------------------------------------------------------------------------------ the whole thing


def in_this_process(command: Sequence[str]) -> int:
    """Runs in this process what the runner starts as a process."""
    if command[0] == "rlhf":
        return rlhf(command[1:])
    assert command[:2] == ["python", str(run.HERE / "prepare.py")]
    prepare.main(command[2:])
    return 0


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """The folder in which the whole runner ran on a small part of the real files."""
    missing = [name for name in FILES if not (DATA / name).exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not in {DATA}; set RLHF_DATA to the folder that holds them")
    folder = tmp_path_factory.mktemp("preferences")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run.main(["--data", str(DATA), "--small"], in_this_process)
    return folder / run.RUNS


@pytest.mark.parametrize("name", run.runs(list(run.PARTS)))
def test_every_run_file_trains_on_the_real_data(ran, name):
    folder = ran / name
    for part in (
        "config.toml",
        "manifest.json",
        "metrics.jsonl",
        "model/model.safetensors",
        "model/config.json",
        "checkpoints",
    ):
        assert (folder / part).exists(), part
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "policy/loss" in line]
    assert [line["step"] for line in trained] == [1, 2]
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert "eval/loss" in lines[-1] or name in ("sft", "rejection_sampling")


def test_no_question_is_on_both_sides(ran):
    task = ran / "task"
    for folder in ("graded/pairs", "graded/labels"):
        train, held_out = (
            {json.loads(line)["question"] for line in (task / folder / f"{side}.jsonl").read_text().splitlines()}
            for side in ("train", "held_out")
        )
        assert train
        assert held_out
        assert not train & held_out


def test_missing_data_is_an_error_that_names_the_flag(tmp_path):
    command = [sys.executable, str(run.HERE / "prepare.py"), str(tmp_path / "task"), "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for part in (*FILES, "not found", str(tmp_path), "--data"):
        assert part in done.stderr
