"""Compares answers that are not a single expression with math-verify: unions, inequalities, equations, matrices."""

from __future__ import annotations

import logging
import re
from math import prod

_LARGE = re.compile(
    r"\^[\s{(]*[^\s^{}()+\-*/=,;<>|&]*[\s}]*\^"  # a power in an exponent
    r"|\d{3}[)}\s]*!|![)}\s]*!"  # a factorial of a large number, or of a factorial
    r"|\\d?t?binom|\\choose|\\sum|\\prod|\\int|\\lim",
)
"""Formulas that SymPy would compute before any comparison. The parser of single expressions has exact limits for
them."""
MAX_POWER = 1000
"""Largest product of the exponents of an answer: powers of sums are expanded."""
DIGITS = 12
"""Digits to which numbers inside a structure must agree."""


def equal_structures(answer: str, truth: str) -> bool:
    """Whether math-verify (Kydlíček 2025) reads both as the same object. Its own deadline is off, because it would need
    a signal. The reward's worker process is killed at the reward's deadline instead."""
    texts = (answer, truth)
    if any(_LARGE.search(text) or _power(text) > MAX_POWER or not re.search(r"\d|\\", text) for text in texts):
        return False
    from math_verify import LatexExtractionConfig, parse, verify  # imported here, because it imports SymPy

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn that no deadline is set
    box = [LatexExtractionConfig(boxed_match_priority=0)]
    left, right = (parse(rf"\boxed{{{text}}}", box, parsing_timeout=None) for text in texts)
    return bool(verify(right, left, float_rounding=DIGITS, allow_set_relation_comp=True, timeout_seconds=None))


def _power(text: str) -> int:
    return prod(int(exponent) or 1 for exponent in re.findall(r"\^[\s{(]*-?(\d{1,9})", text, re.ASCII))
