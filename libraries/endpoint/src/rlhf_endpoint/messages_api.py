"""``/v1/messages``, the API of Anthropic: requests and answers. The conversation is converted to the chat API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_endpoint.chat_request import (
    ApiError,
    ChatChoice,
    ChatRequest,
    invalid,
    read_flag,
    read_model,
    read_sampling,
    read_tools,
)
from rlhf_endpoint.config import ProgramConfig
from rlhf_endpoint.session import Session

LIMITS = ("max_tokens",)
_THINKING = ("adaptive", "disabled")
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}


def read(body: Mapping[str, Any], config: ProgramConfig, session: Session) -> ChatRequest:
    """Raises ApiError."""
    model = read_model(body, config)
    if body.get("max_tokens") is None:
        raise invalid("max_tokens", None, "an integer of at least 1")
    thinking = body.get("thinking")
    if thinking is not None and (not isinstance(thinking, Mapping) or thinking.get("type") not in _THINKING):
        reason = "A budget cannot be enforced: the chat template and the policy decide whether the policy thinks"
        raise invalid("thinking", thinking, f"{{type: 'adaptive'}} or {{type: 'disabled'}}. {reason}")
    if not isinstance(output := body.get("output_config") or {}, Mapping):
        raise invalid("output_config", output, "an object")
    for name, value in (("output_config.format", output.get("format")), ("output_format", body.get("output_format"))):
        if value is not None:
            raise invalid(name, value, "none: answers are text")
    choice = body.get("tool_choice") or {}
    if not isinstance(choice, Mapping):
        raise invalid("tool_choice", choice, "{type: 'auto'} or {type: 'none'}")
    tool_list = body.get("tools")
    if isinstance(tool_list, list):
        tool_list = [_tool(number, tool) for number, tool in enumerate(tool_list)]
    tools, calls = read_tools(tool_list, choice.get("type", "auto"))
    parallel = not read_flag(choice, "disable_parallel_tool_use")
    sampling, stop = read_sampling({**body, "stop": body.get("stop_sequences")}, config, session.ctx, LIMITS)
    return ChatRequest(_messages(body), tools, sampling, model, 1, calls, parallel, stop, read_flag(body, "stream"))


def answer(
    request: ChatRequest, choices: Sequence[ChatChoice], body: Mapping[str, Any], name: str, time_s: int
) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    [choice] = choices
    stopped = next((stop for stop in request.stop if stop in choice.turn.text), None)
    reason = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "stop_sequence" if stopped else "end_turn"}
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(choice.message),
        "stop_reason": reason[choice.finish],
        "stop_sequence": stopped if reason[choice.finish] == "stop_sequence" else None,
        "usage": {"input_tokens": choice.context, "output_tokens": len(choice.turn.ids)},
    }


def chunks(
    request: ChatRequest, choices: Sequence[ChatChoice], body: Mapping[str, Any], name: str, time_s: int
) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer."""
    message = answer(request, choices, body, name, time_s)
    ending = {field: message[field] for field in ("stop_reason", "stop_sequence")}
    usage = {**message["usage"], "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(message["content"]):
        kind = block["type"]
        empty: dict[str, Any] = {"input": {}} if kind == "tool_use" else {kind: ""}
        delta = {"type": f"{kind}_delta", kind: block.get(kind)}
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": ending, "usage": {"output_tokens": message["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in the form of this API."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _tool(number: int, tool: Any) -> Any:
    if not isinstance(tool, Mapping) or (tool.get("type") or "custom") != "custom":
        raise invalid(f"tools[{number}]", tool, "a function: {name, description, input_schema}")
    function = {k: tool[k] for k in ("name", "description") if k in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation as messages of the chat API."""
    entries = body.get("messages")
    if not isinstance(entries, list) or not entries or not all(isinstance(m, Mapping) for m in entries):
        raise invalid("messages", entries, "a list of at least one message")
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _joined("system", body["system"])})
    for number, message in enumerate(entries):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise invalid(f"messages[{number}].role", role, "user, assistant or system")
        if role == "system":
            messages.append({"role": role, "content": _joined(f"messages[{number}].content", content)})
            continue
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
            raise invalid(f"messages[{number}].content", content, "a string or a list of blocks")
        messages += (_assistant_messages if role == "assistant" else _user_messages)(number, blocks)
    if entries[-1].get("role") == "assistant":
        reason = "The policy answers in a new message, so it cannot continue the beginning of an answer"
        raise invalid(f"messages[{len(entries) - 1}].role", "assistant", f"user or system at the end. {reason}")
    return messages


def _assistant_messages(number: int, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An assistant's message in the form of the chat API."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        if block.get("type") == "text":
            message["content"] += _text_field(number, block, "text")
        elif block.get("type") == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + _text_field(number, block, "thinking")
        elif block.get("type") == "tool_use":
            if not isinstance(block.get("input"), Mapping):
                raise invalid(f"messages[{number}].input", block.get("input"), "an object")
            function = {"name": _text_field(number, block, "name"), "arguments": json.dumps(block["input"])}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            raise invalid(f"messages[{number}]", block, "blocks text, thinking and tool_use")
    return [message]


def _user_messages(number: int, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of the chat API for a user's message: results of tools, and texts."""
    messages: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = _joined(f"messages[{number}].content", block.get("content"))
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif block.get("type") != "text":
            raise invalid(f"messages[{number}]", block, "blocks text and tool_result")
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += "\n" + _text_field(number, block, "text")
        else:
            messages.append({"role": "user", "content": _text_field(number, block, "text")})
    return messages


def _joined(location: str, content: Any) -> str:
    """A text, or several blocks of text joined."""
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    texts = [block.get("text") if isinstance(block, Mapping) else None for block in blocks]
    if not all(isinstance(text, str) for text in texts):
        raise invalid(location, content, "a string or a list of text blocks")
    return "\n".join(map(str, texts))


def _text_field(number: int, block: Mapping[str, Any], field: str) -> str:
    if not isinstance(value := block.get(field), str):
        raise invalid(f"messages[{number}].{field}", value, "a string")
    return value


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        # The field signature is required by Anthropic's client. Nothing checks it when the block comes back.
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or []:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks
