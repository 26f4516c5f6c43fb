"""Messages with every text replaced by a marker, to find the position of each text in a chat template's render.

Tags and white space are kept, because templates act on them. The part of a message after its last marker is its tail.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.data.row_fields import Message

_OPEN, _CLOSE = "\ue000", "\ue001"  # private-use characters, which texts do not contain
MARKER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
"""Splits a render into the template's own text and the numbers of the markers."""
_TAG = re.compile(r"(</?[A-Za-z_]\w*>)")


def mark(number: int) -> str:
    return f"{_OPEN}{number}{_CLOSE}"


def with_markers(
    messages: Sequence[Message],
) -> tuple[list[dict[str, Any]], list[tuple[int, str]], dict[int, str]]:
    """The messages with every run of text replaced by a marker; (message, text) by the marker's number; and the tail of
    each message. White space around a text and tags such as ``<think>`` are kept, because templates act on them."""
    marked, texts, tails = [], list[tuple[int, str]](), dict[int, str]()
    for m, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):  # parts, some of them images
            read = [{**p, "text": _marked(m, p["text"], texts, tails)} if "text" in p else p for p in content]
            marked.append({**message, "content": read})
        else:
            text = _marked(m, content or "", texts, tails)
            marked.append({**message, "content": text} if "content" in message else dict(message))
    return marked, texts, tails


def _marked(m: int, content: str, texts: list[tuple[int, str]], tails: dict[int, str]) -> str:
    """One text of message ``m`` with markers; adds to ``texts`` and ``tails``."""
    parts = []
    for part in _TAG.split(content):
        core = part.strip()
        if core and not _TAG.fullmatch(part):
            lead = part[: part.index(core)]
            tails[m] = part[len(lead) + len(core) :]
            parts.append(f"{lead}{mark(len(texts))}{tails[m]}")
            texts.append((m, core))
        else:
            tails[m] = tails.get(m, "") + part
            parts.append(part)
    return "".join(parts)


def tail_length(piece: str, tail: str, trained: int | None) -> int:
    """Number of characters of ``piece``, the text after the last text of a message, that belong to the message: tags
    and the white space between them.

    Raises DataError: the answer is trained on (``trained`` is the message's number) and the template omits a tag.
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
