"""Compares the results of a program with the expected results, outside the sandbox."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_plugin_code.row_tests import CallTest, StdinTest
from rlhf_plugin_code.sandbox_launcher import Finished

Word = Literal["passed", "wrong", "error", "timeout", "output", "not run", "unanswered"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one test."""

    word: Word
    """``wrong``: another answer. ``error``: an exception, a status other than 0, or no answer. ``output``: too much."""
    reason: str = ""


def stdin_verdict(test: StdinTest, run: Finished, cpu_seconds: int) -> Verdict:
    """Spaces at the ends of lines and empty lines at the end are ignored."""
    failure = _failure(run, cpu_seconds)
    if failure is not None:
        return failure
    if _lines(run.out) != _lines(test.expected):
        return Verdict("wrong", f"it printed {run.out[:60]!r}")
    return Verdict("passed")


def call_verdicts(tests: Sequence[CallTest], run: Finished, cpu_seconds: int, tolerance: float) -> list[Verdict]:
    """One verdict per call."""
    return [
        answer if isinstance(answer, Verdict) else _verdict(answer, test, tolerance)
        for answer, test in zip(call_answers(len(tests), run, cpu_seconds), tests, strict=True)
    ]


def call_answers(calls: int, run: Finished, cpu_seconds: int) -> list[str | Verdict]:
    """The answer to each call as written by the program's process, or the reason why it is missing. A call that was
    answered twice counts as unanswered, so that a program cannot choose between two answers."""
    lines: dict[int, list[str]] = {}
    for line in run.out.split("\n"):
        mark, _, rest = line.partition(" ")
        number, _, answer = rest.partition(" ")
        if mark == run.nonce and number.isascii() and number.isdigit() and len(number) < 10:
            lines.setdefault(int(number), []).append(answer)
    failure = _failure(run, cpu_seconds) or Verdict("error", "the program ended without an answer")
    answers: list[str | Verdict] = []
    for n in range(calls):
        replies = lines.get(n, [])
        if not replies:
            answers.append(failure)
            failure = Verdict("not run", failure.reason) if failure.word in ("timeout", "output") else failure
        else:
            answers.append(replies[0] if len(replies) == 1 else Verdict("error", f"{len(replies)} answers to one call"))
    return answers


def _verdict(answer: str, test: CallTest, tolerance: float) -> Verdict:
    kind, _, text = answer.partition(" ")
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return Verdict("error", f"an answer that is not JSON: {text[:60]!r}")
    if kind != "=":
        return Verdict("error", printable(value))
    if any(matches(value, expected, tolerance) for expected in test.expected):
        return Verdict("passed")
    return Verdict("wrong", f"{test.function}() returned {text[:60]}")


def matches(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether two JSON values are equal and of equal types: 1, 1.0 and true differ.

    Args:
        tolerance: largest difference of two floats, absolute and relative to the larger one.
    """
    if type(value) is not type(expected):
        return False
    if isinstance(value, list):
        return len(value) == len(expected) and all(
            matches(*pair, tolerance) for pair in zip(value, expected, strict=True)
        )
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(matches(value[key], expected[key], tolerance) for key in value)
    if isinstance(value, float):
        return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(value == expected)


def _failure(run: Finished, cpu_seconds: int) -> Verdict | None:
    if run.end == "output":
        return Verdict("output", "it wrote more than the limit")
    if run.end in ("threads", "files"):
        return Verdict("error", f"it was killed because it had too many {run.end}")
    by_signal = run.code < 0 or run.code > 128
    if run.end == "wall" or (by_signal and run.seconds >= cpu_seconds):
        limit = "wall time" if run.end == "wall" else "processor time"
        return Verdict("timeout", f"it was killed at the limit of {limit}")
    if run.code:
        last = run.err.rsplit("\n", 1)[-1][:200]
        return Verdict("error", last or f"it ended with status {run.code}")
    return None


def printable(value: Any) -> str:
    """The start of a text of the program, such as an exception's, as text that can be stored."""
    return str(value)[:200].encode(errors="replace").decode()


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON value")
