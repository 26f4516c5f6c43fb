"""Finds the program in an answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

FENCE = re.compile(r"^[ \t]*```[ \t]*([^\s`]*)[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)


def last_block(text: str, tags: Sequence[str]) -> str | None:
    """The content of the last closed fenced block with one of these tags; None if there is none.

    Args:
        tags: in any case of letters; an empty text allows blocks without a tag.
    """
    allowed = {tag.casefold() for tag in tags}
    found = None
    for block in FENCE.finditer(text):
        if block[1].casefold() in allowed:
            found = block[2]
    return found
