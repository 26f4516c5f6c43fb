"""Conversations in the form of the OpenAI chat API as tokens, and what follows a sampled answer in one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import DataError, shown

from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.image_parts import read_content
from rlhf_runtime.data.text_tokens import TextTokens

ROLES = ("system", "user", "assistant", "tool")
_KEPT = ("name", "tool_call_id", "reasoning_content")

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class ChatMessages:
    """Encodes conversations with a chat template.

    Args:
        ends: texts of the tokens that end an answer.

    Messages are those of :func:`as_template_reads`. The methods raise DataError for messages that the template refuses.
    """

    def __init__(self, chat: ChatTemplate, tokens: TextTokens, ends: Sequence[str]) -> None:
        self._chat, self._tokens, self._ends = chat, tokens, tuple(end for end in ends if end)

    def encode(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """A whole conversation, which the policy can answer."""
        return self._tokens.ids(self._chat.text(messages, answer=True, tools=tools))

    def encode_following(self, asked: Messages, new: Messages, tools: Tools, closed: bool) -> list[int] | None:
        """What the template writes after an answer. The tokens up to its end are kept as they are.

        Args:
            asked: the messages up to the answer, which is the last one.
            new: the messages after it.
            closed: whether the sampled answer ended with its end token. If not, the tokens begin with it.

        Returns: None if the template writes ``asked`` otherwise once other messages follow, so that the tokens so far
            are not what the template would show the policy.
        """
        opened = self._chat.text(asked[:-1], answer=True, tools=tools)
        answered = self._chat.text(asked, answer=False, tools=tools)
        whole = self._chat.text([*asked, *new], answer=True, tools=tools)
        if not answered.startswith(opened) or not whole.startswith(answered):
            return None
        written = answered[len(opened) :].rstrip()  # a line break may follow the end token
        end = max((e for e in self._ends if written.endswith(e)), key=len, default="")
        added = whole[len(opened) + len(written) - len(end) :] if end else whole[len(answered) :]
        if not end:  # some templates write the end token only once another message follows
            end = max((e for e in self._ends if added.lstrip().startswith(e)), key=len, default="")
        if not closed or not end:
            return self._tokens.ids(added) if end else self._tokens.ids_after(answered, added)
        return self._tokens.ids_after(end, added.partition(end)[2])


def as_template_reads(messages: Messages) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages as chat templates read them: content is text, or parts where it has images, the arguments of tool calls
    are parsed, unknown fields are left out. Also the images, as the messages hold them.

    Raises DataError, which names the message.
    """
    images: list[Any] = []
    return [_message(number, message, images) for number, message in enumerate(messages)], images


def _message(number: int, message: Mapping[str, Any], images: list[Any]) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise DataError(
            f"message {number}: the role is {shown(role)}; allowed: {', '.join(ROLES)} and developer, which is system"
        )
    content = read_content(message.get("content"), f"message {number}", images)
    read: dict[str, Any] = {"role": role, "content": content}
    for field in _KEPT:
        if isinstance(value := message.get(field), str) and value:
            read[field] = value
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise DataError(f"message {number}: tool_calls must be a list, got {shown(calls)}")
    if calls:
        read["tool_calls"] = [_call(number, call) for call in calls]
    return read


def _call(number: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(
            f"message {number}: a tool call must be {{id, type, function: {{name, arguments}}}}, got {shown(call)}"
        )
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = arguments  # a template writes such a text as it is
    arguments = parsed if isinstance(parsed, Mapping) else {} if arguments in (None, "") else arguments
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
