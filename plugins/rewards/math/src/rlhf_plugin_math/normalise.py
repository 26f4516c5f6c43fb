"""Normalises answers: removes LaTeX, units, currency and punctuation that do not change an answer."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_DROP = re.compile(r"\\(?:left|right|displaystyle|,|!|;|:|quad|qquad)(?![a-zA-Z])|~|(?<!\\)\\ |\u202f|\u00a0")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname)\s*\{([^{}]*)\}(?:\s*\^\s*\{?[23]\}?)?")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree\b")
_CURRENCY = re.compile(r"\\\$|\$|€|£|¥")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?![\d,])", re.ASCII)
_LATEX_THOUSANDS = re.compile(r"(?<=\d)\{,\}(?=\d{3})", re.ASCII)
_OTHER_THOUSANDS = re.compile(r"(?<![\w.])\d{1,3}(?:(?:\\?_|\\[, ]|[ ~\u202f\u00a0])\d{3})+(?![\w,]|\s*/)", re.ASCII)
"""``1_000``, or a space between the groups (not of the mixed number ``1 100/200``)."""
_CHARACTERS = re.compile(r"\s*([\u00bc-\u00be\u2150-\u215e])")
"""Fractions that are one character."""
_TAIL = re.compile(r"(?<=[\d)}%])(\s*)([A-Za-z]+)(?:[A-Za-z\s/.^{}-]|(?<!\s)\d)*$", re.ASCII)
"""A unit: ``m/s^2``, but not the rest of ``3 ft 4 in``."""
_NOT_UNITS = {"and", "or", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "to", "e"}
_SHORT_UNITS = set("mgshLlNJWVKCF")
MAX_CHARS = 1000
"""Longer answers are not normalised: no final answer is that long, and some searches here are quadratic."""
_VARIABLE_PREFIX = re.compile(r"[A-Za-z]\s*(?:=|∈|\\in(?![a-zA-Z]))\s*(?=\S)(?!=)")
_FACTORIAL = re.compile(r"(?:[\d)}]|(?<![A-Za-z])[A-Za-z])!\Z")
_FRACTION = re.compile(r"([+-]?)\s*(?:(\d+)\s*[ ]\s*)?(\d+)\s*/\s*(\d+)", re.ASCII)
_LATEX_FRACTION = re.compile(
    r"([+-]?)\s*(\d+)?\s*\\[dt]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))", re.ASCII
)
_SCIENTIFIC = re.compile(
    r"([+-]?\d+(?:\.\d+)?)\s*(?:(?:\\times|\\cdot|\*|x|×)\s*10\s*\^\s*\{?\s*([+-]?\d{1,3})\s*\}?|[eE]([+-]?\d{1,3}))",
    re.ASCII,
)
_DECIMAL = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)", re.ASCII)
_RECURRING = re.compile(r"([+-]?)(\d*)\.(\d*)\s*\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))", re.ASCII)


def normalise(answer: str) -> str:
    """The answer without decoration. Idempotent; keeps the percent sign, which :func:`number` reads."""
    text = answer.strip().strip("*_`").strip()
    if len(text) > MAX_CHARS:
        return text
    text = re.sub(r"^\\[(\[](.*)\\[)\]]$", r"\1", text)
    text = _CURRENCY.sub("", text)
    text = _OTHER_THOUSANDS.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    text = _CHARACTERS.sub(lambda m: " " + unicodedata.normalize("NFKC", m[1]).replace("\u2044", "/"), text)
    text = _DROP.sub(" ", text)
    text = text.replace("−", "-").replace("–", "-").replace("\\%", "%").replace("²", "^2").replace("³", "^3")
    text = re.sub(r"^([+-]?)\{([\d.,]+)\}\s*%", r"\1\2%", text, flags=re.ASCII)
    text = _LATEX_THOUSANDS.sub("", text)
    text = _THOUSANDS.sub(lambda m: m[1] + m[2].replace(",", ""), text)
    text = _DEGREES.sub("", text)
    text = _TEXT.sub(lambda m: f" {m[1]} " if _is_part(m) else " ", text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(".,;:").strip()
    text = text if _FACTORIAL.search(text) else text.rstrip(".,;:!").strip()
    text = _VARIABLE_PREFIX.sub("", text, count=1) if _VARIABLE_PREFIX.match(text) else text
    text = _without_unit(text)
    if re.fullmatch(r"\(\s*[A-Za-z]\s*\)", text):  # a multiple-choice letter
        text = text.strip("() ")
    return text


def number(text: str) -> tuple[Fraction, bool] | None:
    """(value, whether a percent sign follows it) of a plain number, fraction or mixed number; None for other texts.

    A percentage keeps the value before the sign: ``50%`` is (50, True).
    """
    text = text.strip()
    while text.startswith("(") and text.endswith(")") and "(" not in text[1:]:
        text = text[1:-1].strip()
    percent = text.endswith("%")
    if percent:
        text = text[:-1].strip()
    if len(text) > 200:  # int() of long digit strings is quadratic
        return None
    if m := _DECIMAL.fullmatch(text):
        return Fraction(text), percent
    if m := _RECURRING.fullmatch(text):  # all digits less those before the period, over 9...90...0
        prefix, period = m[2] + m[3], m[4] or m[5]
        value = Fraction(int(prefix + period) - int(prefix or 0), (10 ** len(period) - 1) * 10 ** len(m[3]))
        return (-value if m[1] == "-" else value), percent
    if m := _FRACTION.fullmatch(text):
        return _mixed(m[1], m[2], m[3], m[4], percent)
    if m := _LATEX_FRACTION.fullmatch(text):
        return _mixed(m[1], m[2], m[3] or m[4], m[5] or m[6], percent)
    if m := _SCIENTIFIC.fullmatch(text):
        return Fraction(m[1]) * Fraction(10) ** int(m[2] or m[3]), percent
    return None


def _is_part(text: re.Match[str]) -> bool:
    """Whether a match of :data:`_TEXT` is a part of the answer: ``and`` and similar words, text between two numbers,
    and all text of an answer that has no digit elsewhere. Other texts are units and explanations."""
    front, rest = text.string[: text.start()].rstrip(), text.string[text.end() :].lstrip()
    is_joint = text[1].strip().lower() in _NOT_UNITS or (front[-1:].isdigit() and rest[:1].isdigit())
    return is_joint or not re.search(r"\d", front + rest)


def _without_unit(text: str) -> str:
    """``18 dollars`` -> ``18``, but ``2x`` and ``3 pi`` are not changed."""
    tail = _TAIL.search(text)
    if tail is None or tail[2].lower() in _NOT_UNITS:
        return text
    if len(tail[2]) == 1 and not (tail[1] and tail[2] in _SHORT_UNITS):
        return text
    amount = text[: tail.start()].strip()
    return amount if number(amount) is not None else text


def _mixed(sign: str, integer: str | None, top: str, bottom: str, percent: bool) -> tuple[Fraction, bool] | None:
    if int(bottom) == 0:
        return None
    value = int(integer or 0) + Fraction(int(top), int(bottom))
    return (-value if sign == "-" else value), percent
