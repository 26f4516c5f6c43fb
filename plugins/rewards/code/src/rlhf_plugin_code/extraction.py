"""Finds the program in an answer, in time that is linear in the answer's length: it runs on the event loop, where no
deadline ends it."""

from __future__ import annotations

from collections.abc import Sequence

MARK = "```"
BLANKS = " \t\r\ufeff"


def last_block(text: str, tags: Sequence[str]) -> str | None:
    """The content of the last closed fenced block with one of these tags; None if there is none.

    Args:
        tags: in any case of letters; an empty text allows blocks without a tag.
    """
    allowed = {tag.casefold() for tag in tags}
    block, tag, start = None, None, 0
    position = 0
    for line in text.split("\n"):
        position += len(line) + 1
        bare = line.strip(BLANKS)
        if tag is None:
            if bare.startswith(MARK) and "`" not in bare[len(MARK) :]:
                words = bare[len(MARK) :].split(maxsplit=1)
                tag, start = words[0] if words else "", position
        elif bare == MARK:
            if tag.casefold() in allowed:
                block = text[start : position - len(line) - 1]
            tag = None
    return block
