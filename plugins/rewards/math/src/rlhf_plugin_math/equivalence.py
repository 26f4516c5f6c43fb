"""Decides whether two answers are the same mathematical object."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import accumulate

from rlhf_plugin_math.normalise import normalise, number
from rlhf_plugin_math.structured import equal_structures

POINTS = (Fraction(7, 5), Fraction(-13, 11), Fraction(29, 17))
"""Values of free symbols at which expressions are compared: positive and negative, not roots of common expressions."""
DIGITS = 30


def equivalent(answer: str, truth: str, tolerance: float = 0.0, max_chars: int = 300, max_bits: int = 10_000) -> bool:
    """Whether the answers are equal as text, as numbers, element by element, as expressions, or as structures.

    ``50%`` equals both 50 and 1/2, because data sets use both. Expressions are equal if their difference is zero: by
    SymPy's automatic arithmetic, or numerically to 30 digits at three points (Schwartz 1980: only an answer that was
    constructed for these points can agree at them by mistake). Nothing is simplified, so the cost is bounded. Answers
    that these rules cannot read are passed to math-verify.
    """
    verdict = _verdict(answer, truth, tolerance, max_chars, max_bits)
    return equal_structures(answer, truth) if verdict is None else verdict


def _verdict(answer: str, truth: str, tolerance: float, max_chars: int, max_bits: int) -> bool | None:
    """Whether the answers are equal; None if these rules cannot read one of them."""
    left, right = normalise(answer), normalise(truth)
    if not left or not right:
        return False
    if _text(left) == _text(right):
        return True
    a, b = number(left), number(right)
    if a is not None and b is not None:
        return _equal_numbers(a, b, tolerance)
    if len(left) > max_chars or len(right) > max_chars:
        return False
    parts_a, parts_b = _parts(left), _parts(right)
    if parts_a is not None and parts_b is not None:
        return _equal_parts(parts_a, parts_b, tolerance, max_chars, max_bits)
    if parts_a is not None or parts_b is not None or not (_formula(left) and _formula(right)):
        return None
    return _equal_expressions(left, right, max_bits)


def _equal_numbers(a: tuple[Fraction, bool], b: tuple[Fraction, bool], tolerance: float) -> bool:
    def readings(value: Fraction, percent: bool, other_percent: bool) -> set[Fraction]:
        return {value, value / 100} if percent and not other_percent else {value}

    pairs = ((x, y) for x in readings(*a, b[1]) for y in readings(*b, a[1]))
    return any(x == y or abs(x - y) <= Fraction(tolerance) * abs(y) for x, y in pairs)


def _equal_parts(
    a: tuple[str, list[str], str], b: tuple[str, list[str], str], tolerance: float, max_chars: int, max_bits: int
) -> bool | None:
    """Tuples, intervals and sets: same brackets, equal elements in order (sets: in any order)."""
    if (a[0], a[2]) != (b[0], b[2]):
        return None
    if len(a[1]) != len(b[1]):
        return False
    rest = list(b[1])
    for element in a[1]:
        candidates = rest if a[0] in ("{", "") else rest[:1]
        verdicts = [_verdict(element, c, tolerance, max_chars, max_bits) for c in candidates]
        match = next((c for c, equal in zip(candidates, verdicts, strict=True) if equal), None)
        if match is None:
            return None if None in verdicts else False
        rest.remove(match)
    return True


def _parts(text: str) -> tuple[str, list[str], str] | None:
    r"""(opening, elements, closing) of ``(1, 2)``, ``[0, 1)``, ``\{1, 2\}`` or ``1, 2``; None without a comma."""
    text = text.replace("\\{", "{").replace("\\}", "}").strip()
    opening, closing = "", ""
    if len(text) > 2 and text[0] in "([{" and text[-1] in ")]}" and min(_depths(text[1:-1]), default=0) >= 0:
        opening, closing, text = text[0], text[-1], text[1:-1]
    if "," in text and "=" not in text:  # 1, 2 and 3
        text = re.sub(r",?\s(?:and|or)\s", ", ", text)
    commas = [i for i, (c, depth) in enumerate(zip(text, _depths(text), strict=True)) if c == "," and depth == 0]
    starts, ends = [0, *(i + 1 for i in commas)], [*commas, len(text)]
    elements = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    return (opening, elements, closing) if commas else None


def _depths(text: str) -> list[int]:
    """Number of open brackets after each character."""
    return list(accumulate({"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(c, 0) for c in text))


def _formula(text: str) -> bool:
    """Whether the text may be a formula: it has a digit, an operator or a command, and no prose."""
    words = re.findall(r"(?<![\\a-zA-Z])[A-Za-z]{2,}", text)
    commands = {"sqrt", "sin", "cos", "tan", "exp", "ln", "log", "pi", "abs"}
    return all(w in commands for w in words) and bool(re.search(r"[\d+\-*/^\\|]|^[A-Za-z]$|π|√|pi", text))


def _equal_expressions(left: str, right: str, max_bits: int) -> bool | None:
    import sympy  # imported here, because most answers are plain numbers and the import is slow

    from rlhf_plugin_math.expression import FormulaError, NoValue, parse

    try:
        a, b = parse(left, max_bits), parse(right, max_bits)
        difference = a - b
        if difference.is_Rational:  # also for values with too many equal digits: e^(10^6) and e^(10^6) + 1
            return bool(difference == 0)
        symbols = sorted(difference.free_symbols, key=str)
        for shift in range(len(POINTS)):
            # each symbol gets another value: after three symbols the points are used again, increased by 1
            values = {s: sympy.Rational(*POINTS[(i + shift) % len(POINTS)].as_integer_ratio()) + i // len(POINTS)
                      for i, s in enumerate(symbols)}  # fmt: skip
            scale = 1 + abs(sympy.N(a, DIGITS, subs=values))
            gap = sympy.N(difference, DIGITS, subs=values)
            if not gap.is_number or not abs(gap) < sympy.Float(10) ** (5 - DIGITS) * scale:
                return False
            if not symbols:
                break
        return True
    except FormulaError:
        return None
    except (NoValue, ArithmeticError, ValueError, TypeError, RecursionError):
        return False


def _text(text: str) -> str:
    """The text without spaces and without braces around one character. Spaces between digits stay: 1 2 is not 12. Other
    braces stay, as LaTeX reads them: \\frac{1}{23} is not \\frac{12}{3}."""
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)|\\(?=[{}])", "", text)
    return re.sub(r"\{(.)\}", r"\1", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").casefold()
