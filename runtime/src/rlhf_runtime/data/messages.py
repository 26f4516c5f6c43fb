"""Chat messages in the form that chat templates read, and the images in their content. Messages of rows, environments,
tools and programs are all read here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import DataError, brief, did_you_mean

from rlhf_runtime.data.strict_json import STRICT, decoded

ROLES: Mapping[str, str] = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "developer": "system",
    "human": "user", "gpt": "assistant", "function": "tool", "observation": "tool",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
}  # fmt: skip
"""{name of a role: role}: names of the OpenAI chat API, then names of ShareGPT."""

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields with the reasoning of an answer, which templates write before its content."""

UNTRAINED = "weight"
"""Field that marks an assistant message as not trained on, with value 0. Templates do not get it."""
_NUMBERS = (UNTRAINED, "loss_weight")
_WEIGHTS = (*_NUMBERS, "train", "training", "loss")
"""Fields that say whether a message is trained on. The first ones may be numbers."""
_PARTS = ("reasoning", "tool_call")
"""Types of content parts in LLaMA-Factory that other formats have as fields of a message."""

Messages = Sequence[Mapping[str, Any]]


def read_messages(messages: Messages, label: str = "") -> list[dict[str, Any]]:
    """Messages as chat templates read them, with images still in their parts.

    Each message has ``role`` (system, user, assistant or tool) and ``content`` (text, or parts if it has images). It
    has further fields only if they contain text, and ``tool_calls``, with parsed arguments, only if there are calls. So
    a template sees neither null nor JSON text. An assistant message whose weight is 0 also has :data:`UNTRAINED`.

    Args:
        label: text before the number of the message in errors.

    Raises DataError, which names the message.
    """
    return [_message(f"{label}message {number}", message) for number, message in enumerate(messages)]


def as_template_reads(messages: Messages) -> tuple[list[dict[str, Any]], list[Any]]:
    """(messages as :func:`read_messages` returns them, without their images; the images in the form in which the
    messages contain them). Raises DataError."""
    images: list[Any] = []
    return [as_shown(m, images) for m in read_messages(messages)], images


def as_shown(message: Mapping[str, Any], images: list[Any]) -> dict[str, Any]:
    """A message of :func:`read_messages` in the form for templates, where an image is :data:`PLACE`. The image of each
    part is appended to ``images``; None if the part contains none."""
    fields = {field: value for field, value in message.items() if field != UNTRAINED}
    content = message["content"]
    if isinstance(content, list):
        images += [image_of(part) for part in content if is_image(part)]
        content = [dict(PLACE) if is_image(part) else part for part in content]
    return {**fields, "content": content}


def as_api_writes(messages: Messages) -> list[dict[str, Any]]:
    """Messages of :func:`read_messages` in the form of the OpenAI chat API: arguments of tool calls are JSON text."""
    return [
        {**m, "tool_calls": [_with_json_arguments(c) for c in m["tool_calls"]]} if "tool_calls" in m else dict(m)
        for m in messages
    ]


def as_json(arguments: Any) -> str:
    """A tool call's arguments as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def as_people_read(messages: Messages) -> tuple[tuple[str, str], ...]:
    """(role, text) of each message that a template reads. Each tool call is a line ``name(arguments)``."""
    texts = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        lines = [text_of(message.get("content")), *(f"{call['name']}({as_json(call['arguments'])})" for call in calls)]
        texts.append((message["role"], "\n".join(line for line in lines if line)))
    return tuple(texts)


def _message(label: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(f"{label}: must be {{role, content}}, got {brief(message)}")
    name = message.get("role")
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        aliases = ", ".join(f"{other} ({role})" for other, role in ROLES.items() if other != role)
        raise DataError(
            f"{label}: the role is {brief(name)}; allowed: {', '.join(dict.fromkeys(ROLES.values()))}, and the names "
            f"{aliases}.{did_you_mean(str(name), ROLES)}"
        )
    message = _without_parts(label, message)
    result: dict[str, Any] = {"role": role, "content": read_content(message.get("content"), label)}
    for field in REASONING:
        if not isinstance(message.get(field) or "", str):
            raise DataError(f"{label}: {field} must be text, got {brief(message[field])}")
    for field, value in message.items():
        if field not in ("role", "content", "tool_calls", *_WEIGHTS) and isinstance(value, str) and value:
            result[field] = value
    if role == "assistant" and not _is_trained(label, message):
        result[UNTRAINED] = 0
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise DataError(f"{label}: tool_calls must be a list, got {brief(calls)}")
    calls = [*calls, *filter(None, [message.get("function_call")])]  # from older versions of the chat API
    if calls:
        result["tool_calls"] = [_call(label, call) for call in calls]
    return result


def _without_parts(label: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with the parts of reasoning and tool calls in its content moved to fields."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    value_parts = [p for p in parts if isinstance(p, Mapping) and p.get("type") in _PARTS and "value" in p]
    if not value_parts:
        return message
    reasoning, calls = ([p["value"] for p in value_parts if p["type"] == kind] for kind in _PARTS)
    try:
        texts = {"reasoning_content": "\n".join(reasoning)} if reasoning else {}
        tool_calls = [STRICT.decode(call) for call in calls]
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{label}: reasoning must be text, and a tool call must be JSON as text: {error}") from None
    rest = [p for p in parts if p not in value_parts]
    return {**message, **texts, "content": rest, "tool_calls": [*(message.get("tool_calls") or ()), *tool_calls]}


def _is_trained(label: str, message: Mapping[str, Any]) -> bool:
    weights = {f: v for f in _WEIGHTS if (v := message.get(f)) is not None and (f in _NUMBERS or isinstance(v, bool))}
    for field, value in weights.items():
        if value not in (0, 1):
            raise DataError(
                f"{label}: {field} is {brief(value)}; allowed: 1, and 0 for a message that is not trained on. Other "
                "weights are not supported"
            )
    return all(weights.values())


def _call(label: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if function is None and isinstance(call, Mapping) and "arguments" in call:
        function = call  # {name, arguments}, without the rest
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{label}: a tool call must be {{id, type, function: {{name, arguments}}}}, got {brief(call)}")
    arguments = function.get("arguments")
    parsed = decoded(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(parsed, Mapping):
        parsed = {} if arguments in (None, "") else arguments  # a template writes other values unchanged
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": parsed},
    }


def _with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": as_json(function["arguments"])}}


# ------------------------------------------------------------------------------- content, with its images

_TEXTS = (None, "text", "input_text", "output_text")
PLACE = {"type": "image"}
"""An image in a message, as chat templates read it."""
Parts = list[dict[str, Any]]


def read_content(content: Any, label: str) -> str | Parts:
    """The content of a message: text, or parts if at least one part is an image. :func:`as_shown` reads the images.

    Args:
        label: names the message in errors.

    Raises DataError: the content is neither text nor a list of parts of text and images.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts: Parts = []
    for part in content if isinstance(content, list | tuple) else [content]:
        if is_image(part):
            parts.append(dict(part))
        elif isinstance(part, Mapping) and part.get("type") in _TEXTS and isinstance(_text(part), str):
            parts.append({"type": "text", "text": _text(part)})
        else:
            raise DataError(
                f"{label}: content must be text or a list of {{type: text, text}} and {{type: image}} parts, got "
                f"{brief(part)}"
            )
    return parts if any(map(is_image, parts)) else text_of(parts)


def _text(part: Mapping[str, Any]) -> Any:
    return part.get("text", part.get("value"))  # LLaMA-Factory: {type: text, value}


def is_image(part: Any) -> bool:
    """Whether a part of content says that it is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image")


def text_of(content: Any) -> str:
    """The text of content that :func:`as_shown` returned; parts of text are joined by line breaks."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def with_text(content: str | Parts, text: str) -> str | Parts:
    """Content with more text after it."""
    if not isinstance(content, list):
        return content + text
    *parts, last = content
    if last == PLACE:
        return [*content, {"type": "text", "text": text.lstrip()}]
    return [*parts, {**last, "text": last["text"] + text}]


def with_images(content: str | Parts, count: int) -> Parts:
    """Content after ``count`` images."""
    text = content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    return [*(dict(PLACE) for _ in range(count)), *text]


def places(messages: Sequence[Mapping[str, Any]]) -> int:
    """Number of images in messages."""
    return sum(m["content"].count(PLACE) for m in messages if isinstance(m.get("content"), list))


def image_of(part: Mapping[str, Any]) -> Any:
    """The image in a part, in one of the forms that programs write; None if it contains none."""
    for key in ("image", "image_url", "url", "path", "base64", "bytes", "value"):
        value = part.get(key)
        if value is not None:
            value = value.get("url") if key == "image_url" and isinstance(value, Mapping) else value
            if key == "base64" and isinstance(value, str) and not value.startswith("data:"):
                return f"data:image;base64,{value}"
            return value
    return None
