"""Finds the final answer in a text. Every search is linear in the text's length."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

NUMBER = re.compile(
    r"""
    (?<![\w.)\]}])-?(?:\d+\ ?)?[\u00bc-\u00be\u2150-\u215e]   # a fraction that is one character
    |
    (?<![\w.)\]}])-? (?:\$|\\\$)?       # a minus sign, not a subtraction
    (?: \d{1,3}(?:,\d{3})+ | \d{1,3}(?:_\d{3})+(?!\w) | \d+ )      # 1,234 or 1_234 or 1234
    (?: \.\d+ )?
    (?: \s*/\s*\d+ )?                   # a fraction
    (?: \s*\\?% )?
    |
    (?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*\\?%)?
    |
    -?\.\d+
    """,
    re.VERBOSE | re.ASCII,
)
_IS = re.compile(
    r"(?:\banswer\b[*_\s]*(?:is|are|:|=)[*_:\s]*(?:the[ ](?:final[ ])?(?=answer\b))?)+([^\n]+)|^[ \t]*A:[ \t]*([^\n]+)",
    re.IGNORECASE | re.MULTILINE,
)
"""Also matches it twice: "Final Answer: The final answer is 7. I hope it is correct." (Lewkowycz et al. 2022,
Minerva)."""


MAX_CHARS = 1000
"""Number of characters of a sentence that are searched for the answer."""


def extract_answer(text: str, places: Sequence[str]) -> str | None:
    """The answer from the first of ``places`` that has one; None if none has."""
    for place in places:
        answer = _PLACES[place](text)
        if answer is not None and answer.strip():
            return answer.strip()
    return None


_BOX = re.compile(r"\\(?:f?box|boxed)(?:\s*\{|\s+(-?\d+(?:\.\d+)?))", re.ASCII)
"""Some solutions of MATH have a number without braces: ``\boxed 7``."""
_JOIN = re.compile(
    r"(?:\\[()\[\],;]|\\q?quad|[\s$}])*(?:,|;|(?:\\text\s*\{\s*)?\b(?:and|or)\b)(?:\\[()\[\],;]|\\q?quad|[\s$}])*"
)
"""What stands between boxes that are one answer: ``$\boxed{1}$ and $\boxed{2}$``."""


def boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}`` or ``\fbox{...}``, after those that a comma or "and" joins."""
    contents: list[str] = []
    limit = len(text)
    for match in reversed(list(_BOX.finditer(text))):
        content = match[1] or _braced(text, match.end(), limit)
        end = match.end() if match[1] else match.end() + len(content or "") + 1
        if contents and (content is None or not _JOIN.fullmatch(text, end, limit)):
            break
        if content is not None and content not in contents:
            contents.insert(0, content)
        limit = match.start()  # a box that is not closed: an earlier one must end before it
    return ", ".join(contents) if contents else None


def _braced(text: str, start: int, limit: int) -> str | None:
    """The text from ``start`` to its closing brace, which must be before ``limit``."""
    depth = 1
    for i in range(start, limit):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i]
    return None


def after_hash(text: str) -> str | None:
    """The rest of the line after the last ``####``, without a colon before it and an exclamation mark at its end."""
    _, mark, tail = text.rpartition("####")
    return tail.strip().split("\n")[0].removeprefix(":").strip("! ") if mark else None


def tagged(text: str) -> str | None:
    """The content of the last ``<answer>...</answer>``."""
    front, end, _ = text.rpartition("</answer>")
    _, start, content = front.rpartition("<answer>")
    return content if start and end else None


def after_answer_is(text: str) -> str | None:
    """The text after the last "answer is", "answer:" or a line's "A:". A sentence is reduced to its number."""
    match = None
    for match in _IS.finditer(text):  # noqa: B007 - the last one counts
        pass
    if match is None:
        return None
    rest = (match[1] or match[2])[:MAX_CHARS].strip().strip("*_ ")
    sentence = re.match(r"(.*?)[.!;]?(?:\s+(?:[A-Za-z]{2,}|I\s+[a-z]).*)?$", rest.rstrip("."))
    short = sentence[1] if sentence else rest
    if re.search(r"\d", rest) and not re.search(r"\d", short):
        number = NUMBER.search(rest)
        return number[0] if number else rest
    return short or rest


def last_number(text: str) -> str | None:
    """The last number, with its sign, fraction and percent sign."""
    match = None
    for match in NUMBER.finditer(text):  # noqa: B007 - the last one counts
        pass
    return None if match is None else match[0]


_PLACES: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed,
    "hash": after_hash,
    "tag": tagged,
    "answer_is": after_answer_is,
    "last_number": last_number,
}
