"""Graded solutions of GSM8K questions as pairs (a right and a wrong solution of one question) and as labelled answers.

The file has each question with the solutions of four models and whether the final number is right (`is_correct`). A
solution with wrong steps can therefore be graded right.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from examples.gsm8k.prepare import CALCULATOR_MARK

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
_FINAL = re.compile(r"\nA: *([^\n]*)\Z")


def answer(solution: str) -> str:
    """A solution as `examples/gsm8k` writes one: without calculator marks, and `#### 18` for the last line `A: 18`."""
    return _FINAL.sub(r"\n#### \1", CALCULATOR_MARK.sub("", solution.strip()))


def graded(row: Mapping[str, Any]) -> dict[str, bool]:
    """{answer: whether it is right} of one question, each text once and in the order of MODELS. A text that is graded
    both right and wrong is left out."""
    grades: dict[str, set[bool]] = {}
    for model in MODELS:
        grades.setdefault(answer(row[model]["solution"]), set()).add(bool(row[model]["is_correct"]))
    return {text: values.pop() for text, values in grades.items() if len(values) == 1}


def pairs(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Every right answer with every wrong one to the same question; no pairs if all are right or all are wrong."""
    for row in rows:
        answers = graded(row)
        for chosen in (text for text, right in answers.items() if right):
            for rejected in (text for text, right in answers.items() if not right):
                yield {"question": row["question"], "chosen": chosen, "rejected": rejected}


def labels(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every answer with its label."""
    for row in rows:
        for text, right in graded(row).items():
            yield {"question": row["question"], "response": text, "label": right}


def held_out(text: str, share: int = 5) -> bool:
    """Whether a question (or another text that must not be on both sides) belongs to the held-out fifth. Its SHA-256
    decides, so the result does not depend on the order of rows or on other rows."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % share == 0
