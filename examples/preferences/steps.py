"""Steps of worked solutions with a label each, for process reward models. The labels come from the calculator marks.

A step is a line with a mark, together with the lines without one before it. It is labelled right if in each of its
marks, `<<48/2=24>>24`, the result equals the left side (`marks.is_right`), and so does the number in the text after the
mark. Nothing else is judged: not whether the step is useful, and not whether its input numbers are right. Wrong steps
are made: in about half of the steps one digit of a result is replaced by another, in the mark and in the text; later
lines are not changed. Then the marks are removed, as in `examples/gsm8k`, so a model must calculate to judge a step.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from examples.gsm8k.prepare import CALCULATOR_MARK
from examples.preferences.marks import MARK, evaluate, is_right

SHARE = 0.5
"""Share of the steps that are corrupted."""
_EQUATION = re.compile(
    r"<<(?P<left>[^<>=]*)=[^<>=]*>>(?P<text>-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+)", re.ASCII
)
_DIGIT = re.compile(r"\d", re.ASCII)


@dataclass
class Counts:
    """Counts of solutions and steps."""

    rows: int = 0
    steps: int = 0
    wrong: int = 0
    found_wrong: int = 0
    """Steps that were wrong as published; never changed."""
    without_marks: int = 0
    """Solutions left out: no line has a mark."""
    unreadable: int = 0
    """Solutions left out: a step has no label."""


def split(solution: str) -> list[str]:
    """The steps, with marks: a line with a mark, joined by spaces to the lines without one before it. The text after
    the last line with a mark (the final answer) is not a step."""
    steps: list[str] = []
    buffer: list[str] = []
    for line in solution.splitlines():
        if not line.strip():
            continue
        buffer.append(line.strip())
        if MARK.search(line):
            steps.append(" ".join(buffer))
            buffer = []
    return steps


def label(step: str) -> bool | None:
    """Whether all results of a step are right, in its marks and in the text after them. None if that is unclear: a mark
    that cannot be read, or a number in the text that is the result rounded to an integer or without its sign."""
    verdicts = [is_right(mark) for mark in MARK.findall(step)]
    for place in _EQUATION.finditer(step):
        left, text = place["left"], place["text"]
        right = is_right(f"{left}={text}")
        if right is False:
            value, claim = evaluate(left), evaluate(text)
            if value == -claim or ("." not in text and abs(value - claim) < 1):
                right = None
        verdicts.append(right)
    return None if None in verdicts else all(verdicts)


def corrupted(step: str, draw: random.Random) -> str | None:
    """A right step with one digit of one result replaced, so that it is wrong; None if no result appears in the text
    after its mark."""
    places = list(_EQUATION.finditer(step))
    if not places:
        return None
    place = draw.choice(places)
    digits = [m.start() for m in _DIGIT.finditer(place["text"])]
    choices = [
        (k, new)
        for k in digits
        for new in "0123456789"
        if new != place["text"][k]
        and not (new == "0" and k == digits[0] and len(digits) > 1)  # no number is written 07
    ]
    draw.shuffle(choices)
    for k, new in choices:
        text = place["text"][:k] + new + place["text"][k + 1 :]
        mark = f"<<{place['left']}={text.replace(',', '')}>>{text}"
        result = step[: place.start()] + mark + step[place.end() :]
        if label(result) is False:  # a changed last decimal can still be a correct rounding
            return result
    return None


def rows(solutions: Iterable[tuple[str, str]], seed: int, counts: Counts) -> Iterator[dict[str, Any]]:
    """One row for each (question, solution with marks): `question`, `completions` (steps, marks removed), `labels`.

    The corruption depends on the seed, the question and the solution, not on their order.
    """
    for question, solution in solutions:
        steps = split(solution)
        labels = [label(step) for step in steps]
        if not steps:
            counts.without_marks += 1
            continue
        if None in labels:
            counts.unreadable += 1
            continue
        counts.found_wrong += labels.count(False)
        draw = random.Random(f"steps {seed} {question} {solution}")
        for i, step in enumerate(steps):
            chosen = draw.random() < SHARE
            if chosen and labels[i] and (wrong := corrupted(step, draw)) is not None:
                steps[i], labels[i] = wrong, label(wrong)
        counts.rows += 1
        counts.steps += len(steps)
        counts.wrong += labels.count(False)
        yield {"question": question, "completions": [CALCULATOR_MARK.sub("", s) for s in steps], "labels": labels}
