"""Messages with every text replaced by a marker, to see in a render of a chat template where each text came to stand.

Tags and white space are left in place, as templates act on them: what of a message follows its last marker is its tail.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.data.row_fields import Message

_OPEN, _CLOSE = "\ue000", "\ue001"  # private use: no text has them
MARKER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
"""Splits a render into what the template wrote and the numbers of the markers between."""
_TAG = re.compile(r"(</?[A-Za-z_]\w*>)")


def mark(number: int) -> str:
    return f"{_OPEN}{number}{_CLOSE}"


def with_markers(
    messages: Sequence[Message],
) -> tuple[list[dict[str, Any]], list[tuple[int, str]], dict[int, str]]:
    """The messages with every run of text replaced by a marker, (message, text) by the marker's number, and what of
    each message follows its last text. White space around a text and tags such as ``<think>`` stay, as templates act
    on them."""
    marked, texts, tails = [], list[tuple[int, str]](), dict[int, str]()
    for m, message in enumerate(messages):
        parts = []
        for part in _TAG.split(message.get("content") or ""):
            core = part.strip()
            if core and not _TAG.fullmatch(part):
                lead = part[: part.index(core)]
                tails[m] = part[len(lead) + len(core) :]
                parts.append(f"{lead}{mark(len(texts))}{tails[m]}")
                texts.append((m, core))
            else:
                tails[m] = tails.get(m, "") + part
                parts.append(part)
        marked.append({**message, "content": "".join(parts)} if "content" in message else dict(message))
    return marked, texts, tails


def tail_length(piece: str, tail: str, trained: int | None) -> int:
    """How many characters of ``piece``, which follows the last text of a message, are still the message's: tags,
    whatever white space is between them.

    Raises DataError: the answer is trained on (the message's number), and the template leaves a tag out.
    """
    at = 0
    for character in "".join(tail.split()):
        at += len(piece) - at - len(piece[at:].lstrip())
        if not piece.startswith(character, at):
            if trained is None:
                return 0
            raise DataError(
                f"the chat template leaves out part of message {trained} (assistant): {tail.strip()!r}, with which "
                "it ends. Mark answers in the template with {% generation %} ... {% endgeneration %}."
            )
        at += 1
    return at
