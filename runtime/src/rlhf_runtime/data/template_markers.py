"""Messages with every text replaced by a marker, to find the position of each text in a chat template's render.

Tags and white space are kept, because templates act on them. The part of a message after its last marker is its tail.
Tool calls are kept as they are: templates write names and arguments in many forms (JSON, tags, sorted).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.data.messages import REASONING
from rlhf_runtime.data.row_fields import Message

_OPEN, _CLOSE = "\ue000", "\ue001"  # private-use characters, which texts do not contain
MARKER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
"""Splits a render into the template's own text and the numbers of the markers."""
_TAG = re.compile(r"(</?[A-Za-z_]\w*>)")


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a message, which a marker stands for."""

    message: int
    text: str
    reasoning: bool
    """Whether it is an assistant's reasoning before its answer. Templates may leave that out of earlier messages."""


def mark(number: int) -> str:
    return f"{_OPEN}{number}{_CLOSE}"


def with_markers(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Text], dict[int, str]]:
    """The messages with every run of text replaced by a marker; the texts by the marker's number; and the tail of each
    message. White space around a text and tags such as ``<think>`` are kept, because templates act on them."""
    marked, texts, tails = [], list[Text](), dict[int, str]()
    for m, message in enumerate(messages):
        marked_message = dict(message)
        for field in REASONING:
            if isinstance(reasoning := message.get(field), str):
                marked_message[field] = _marked(m, reasoning, texts, tails, end=len(reasoning))
        content = message.get("content")
        if isinstance(content, list):  # parts, some of them images
            marked_message["content"] = [
                {**p, "text": _marked(m, p["text"], texts, tails)} if "text" in p else p for p in content
            ]
        elif "content" in message:
            end = (content or "").rfind("</think>") if message.get("role") == "assistant" else -1
            marked_message["content"] = _marked(m, content or "", texts, tails, end)
        marked.append(marked_message)
    return marked, texts, tails


def _marked(m: int, content: str, texts: list[Text], tails: dict[int, str], end: int = -1) -> str:
    """One text of message ``m`` with markers; adds to ``texts`` and ``tails``. Its reasoning stands before ``end``."""
    marked, position = [], 0
    for part in _TAG.split(content):
        core = part.strip()
        if core and not _TAG.fullmatch(part):
            lead = part[: part.index(core)]
            tails[m] = part[len(lead) + len(core) :]
            marked.append(f"{lead}{mark(len(texts))}{tails[m]}")
            texts.append(Text(m, core, position < end))
        else:
            tails[m] = tails.get(m, "") + part
            marked.append(part)
        position += len(part)
    return "".join(marked)


def tail_length(piece: str, tail: str, trained: int) -> int:
    """Number of characters of ``piece``, the text after the last text of the message ``trained``, that belong to the
    message: tags and the white space between them. Raises DataError: the template omits a tag."""
    at = 0
    for character in "".join(tail.split()):
        at += len(piece) - at - len(piece[at:].lstrip())
        if not piece.startswith(character, at):
            raise DataError(
                f"the chat template leaves out part of message {trained} (assistant): {tail.strip()!r}, with which "
                "it ends. Mark answers in the template with {% generation %} ... {% endgeneration %}."
            )
        at += 1
    return at
