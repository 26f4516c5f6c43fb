"""Calculator marks, `<<48/2=24>>`: parse them, evaluate them exactly, and compare with the result that they state.

Data is never given to Python's `eval`. The grammar is numbers, + - * / and parentheses; a mark with other text cannot
be checked.
"""

from __future__ import annotations

import re
from fractions import Fraction

MARK = re.compile(r"<<([^<>]*)>>")
_NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+", re.ASCII)
_SPACE = re.compile(r"\s*")
MAX_DEPTH = 50
CALCULATOR_DIGITS = 12
"""Significant digits of a result that are trusted: sums of a few 53-bit numbers have about 15."""


class Unreadable(ValueError):
    """Not arithmetic of this grammar, or a division by zero."""


def evaluate(expression: str) -> Fraction:
    """The exact value of numbers (12, 1,200, .5, 3.) joined by + - * / with the usual precedence; signs, parentheses.

    Raises Unreadable, with the place.
    """
    reader = _Reader(expression)
    value = reader.sum()
    if reader.rest():
        raise reader.unreadable("an operator")
    return value


def is_right(mark: str) -> bool | None:
    """Whether the left side of `48/2=24` equals the right side; None if that cannot be decided.

    The right side is one number. A result with decimals may be the value rounded or cut after its last decimal
    (`100/3=33.33`, `2/3=0.66`), so that it lies less than one unit of that decimal away, or come from a calculator that
    computes with 53 bits (`4.2+9.45+1.35=14.999999999999998`). A whole number must be the value.
    """
    left, sign, right = mark.partition("=")
    try:
        if not sign:
            return None
        value, claim = evaluate(left), evaluate(right)
    except Unreadable:
        return None
    number = right.strip().lstrip("-")
    if not _NUMBER.fullmatch(number):
        return None
    decimals = len(number.partition(".")[2])
    unit = max(Fraction(1, 10**decimals), abs(value) / 10**CALCULATOR_DIGITS)
    return value == claim or (decimals > 0 and abs(value - claim) < unit)


class _Reader:
    """Recursive descent over one line."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def rest(self) -> str:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return self.text[self.at :]

    def unreadable(self, expected: str) -> Unreadable:
        return Unreadable(f"{self.text!r}: expected {expected} at {self.text[self.at :][:20]!r}")

    def take(self, signs: str) -> str:
        """The next character if it is one of ``signs``, else the empty string."""
        rest = self.rest()
        if not rest or rest[0] not in signs:
            return ""
        self.at += 1
        return rest[0]

    def sum(self) -> Fraction:
        value = self.product()
        while sign := self.take("+-"):
            value = value + self.product() if sign == "+" else value - self.product()
        return value

    def product(self) -> Fraction:
        value = self.factor()
        while sign := self.take("*/"):
            right = self.factor()
            if sign == "/" and not right:
                raise self.unreadable("a divisor other than 0 before")
            value = value * right if sign == "*" else value / right
        return value

    def factor(self) -> Fraction:
        self.depth += 1
        try:
            if self.depth > MAX_DEPTH:
                raise self.unreadable(f"at most {MAX_DEPTH} signs and parentheses within each other")
            if sign := self.take("+-"):
                return self.factor() if sign == "+" else -self.factor()
            if self.take("("):
                value = self.sum()
                if not self.take(")"):
                    raise self.unreadable("')'")
                return value
            return self.number()
        finally:
            self.depth -= 1

    def number(self) -> Fraction:
        self.rest()
        match = _NUMBER.match(self.text, self.at)
        if match is None:
            raise self.unreadable("a number or '('")
        self.at = match.end()
        return Fraction(match[0].replace(",", "").rstrip("."))
