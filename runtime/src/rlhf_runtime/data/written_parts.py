"""Finds the positions of messages' texts in a chat template's render, and checks that the template writes every part:
texts, the names and arguments of tool calls, the system message and the tools of the run file.

To find the position of each text in a render, every text is replaced by a marker. Tags and white space are kept,
because templates act on them. The part of a message after its last marker is its tail. Tool calls are not changed,
because templates write names and arguments in many forms (JSON, tags, sorted).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.data.messages import REASONING, text_of
from rlhf_runtime.data.row_fields import Message

_OPEN, _CLOSE = "\ue000", "\ue001"  # private-use characters, which texts do not contain
MARKER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
"""Splits a render into the template's own text and the numbers of the markers."""
_TAG = re.compile(r"(</?[A-Za-z_]\w*>)")


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a message, which a marker represents."""

    message: int
    text: str
    reasoning: bool
    """Whether the text is an assistant's reasoning before its answer. Templates may leave reasoning out of earlier
    messages."""


def mark(number: int) -> str:
    return f"{_OPEN}{number}{_CLOSE}"


def with_markers(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Text], dict[int, str]]:
    """(messages with every run of text replaced by a marker, texts by number of the marker, tail of each message)."""
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
    """One text of message ``m`` with markers; adds to ``texts`` and ``tails``. Its reasoning is before ``end``."""
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
    position = 0
    for character in "".join(tail.split()):
        position += len(piece) - position - len(piece[position:].lstrip())
        if not piece.startswith(character, position):
            raise DataError(
                f"the chat template leaves out the end of message {trained} (assistant): {tail.strip()!r}. "
                "Mark answers in the template with {% generation %} ... {% endgeneration %}."
            )
        position += 1
    return position


# -------------------------------------------------------------------------------- parts that are left out

Written = Callable[[Sequence[Message]], Sequence[str]]
"""For each message, the text in which its parts must be: the trained text of a trained answer, else the render."""


def form_of(message: Message) -> tuple[Any, ...]:
    """The properties of a message on which a template may branch. Messages with equal properties are written alike."""
    fields = tuple(sorted(key for key, value in message.items() if value))
    content = message.get("content")
    thinks = "</think>" in text_of(content)
    return message["role"], fields, isinstance(content, list), thinks, len(message.get("tool_calls") or ())


def check_parts(
    writer: Written,
    messages: Sequence[Message],
    trained: Collection[int],
    messages_with_calls: Collection[int],
    reasoning: Collection[int],
    unchecked: Collection[int] = (),
) -> None:
    """Raises DataError: the template leaves out a part of a message.

    Texts are replaced by markers, which the template must write. A changed name or argument of a call must change the
    render.

    Args:
        trained: messages that are trained on.
        messages_with_calls: messages whose tool calls are checked.
        reasoning: messages whose reasoning must be written too.
        unchecked: messages whose texts may be left out.
    """
    marked, texts, _ = with_markers(messages)
    after = _attempt(writer, marked)
    for number, text in enumerate(texts if after else ()):
        if text.message in unchecked:
            continue
        # Templates write some texts as JSON, which escapes the characters of a marker.
        forms = mark(number), json.dumps(mark(number))[1:-1]
        if not any(form in after[text.message] for form in forms) and (not text.reasoning or text.message in reasoning):
            raise _left_out(text.message, messages, trained, f"the text {text.text[:60]!r}")
    original = writer(messages)
    for m, message in enumerate(messages):
        for part, other in _with_other_calls(message) if m in messages_with_calls else ():
            after = _attempt(writer, [*messages[:m], other, *messages[m + 1 :]])
            if after and after[m] == original[m]:
                raise _left_out(m, messages, trained, part)


def _attempt(writer: Written, messages: Sequence[Message]) -> Sequence[str]:
    """The text that the template writes for changed messages. Empty if it refuses them, because then it reads the
    change."""
    try:
        return writer(messages)
    except DataError:
        return ()


def _with_other_calls(message: Message) -> Iterator[tuple[str, Message]]:
    """(name of a part of the message's tool calls, the message with another value of this part), for every part."""
    calls = list(message.get("tool_calls") or ())
    for n, call in enumerate(calls):
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        variants = {"name": {**function, "name": name + "x"}}
        if isinstance(arguments, Mapping):
            for key, value in arguments.items():
                variants[f"argument {key!r}"] = {**function, "arguments": {**arguments, key: _other(value)}}
        else:
            variants["arguments"] = {**function, "arguments": _other(arguments)}
        for part, other in variants.items():
            other_calls = [*calls[:n], {**call, "function": other}, *calls[n + 1 :]]
            yield f"the {part} of its call of {name!r}", {**message, "tool_calls": other_calls}


def _other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, Mapping):
        return {**value, "x": "x"}
    if isinstance(value, list | tuple):
        return [*value, "x"]
    return f"{'' if value is None else value}x"


def _left_out(message: int, messages: Sequence[Message], trained: Collection[int], part: str) -> DataError:
    role = messages[message]["role"]
    place = ", or writes it where it is not trained on" if message in trained else ""
    return DataError(
        f"the chat template leaves out part of message {message} ({role}): {part}{place}. Use a template that writes "
        "it (data.chat_template), or remove it from the message."
    )
