"""``/v1/responses``: requests and answers. The conversation is converted to the chat API."""

from __future__ import annotations

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
from rlhf_endpoint.tree import Message, text_of

LIMITS = ("max_output_tokens",)
_STATE = ("previous_response_id", "conversation", "background", "prompt")
"""Fields that refer to earlier requests, which a server would have to keep."""


def read(body: Mapping[str, Any], config: ProgramConfig, session: Session) -> ChatRequest:
    """Raises ApiError."""
    model = read_model(body, config)
    for field in _STATE:
        if body.get(field):
            raise ApiError(400, f"{field} is not supported; send the whole conversation as input", field)
    text = body.get("text") or {}
    if not isinstance(text, Mapping):
        raise invalid("text", text, "an object")
    kind = text.get("format") or {}
    if not isinstance(kind, Mapping) or kind.get("type", "text") != "text":
        raise invalid("text.format", kind, "{type: 'text'}")
    tools = body.get("tools")
    if isinstance(tools, list):
        tools = [_tool(number, tool) for number, tool in enumerate(tools)]
    tools, calls = read_tools(tools, body.get("tool_choice"))
    parallel = read_flag(body, "parallel_tool_calls", default=True)
    sampling, stop = read_sampling(body, config, session.ctx, LIMITS)
    return ChatRequest(
        _messages(body, session.answers), tools, sampling, model, 1, calls, parallel, stop, read_flag(body, "stream")
    )


def answer(
    request: ChatRequest, choices: Sequence[ChatChoice], body: Mapping[str, Any], name: str, time_s: int
) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    return _response(request, choices[0], body, name, time_s, _output(choices[0].message, name))


def chunks(
    request: ChatRequest, choices: Sequence[ChatChoice], body: Mapping[str, Any], name: str, time_s: int
) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer."""
    [choice] = choices
    output = _output(choice.message, name)
    begun = {**_response(request, choice, body, name, time_s, []), "status": "in_progress", "usage": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{stage}", "response": begun} for stage in ("created", "in_progress")
    ]
    for index, item in enumerate(output):
        events += _item_events(index, item)
    response = _response(request, choice, body, name, time_s, output)
    events.append({"type": f"response.{response['status']}", "response": response})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}


def _tool(number: int, tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise invalid(f"tools[{number}]", tool, "a function: {type: 'function', name, parameters}")
    return {"type": "function", "function": {k: tool[k] for k in ("name", "description", "parameters") if k in tool}}


def _messages(body: Mapping[str, Any], answers: Mapping[str, Message]) -> list[dict[str, Any]]:
    """The input as messages of the chat API."""
    entries = body.get("input")
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(entries, str):
        return [*messages, {"role": "user", "content": entries}]
    if not isinstance(entries, list) or not entries:
        raise invalid("input", entries, "a string or a list of at least one item")
    # Reasoning is an item before the message or calls to which it belongs.
    reasoning = ""
    open_turn = False  # whether calls belong to the last message
    for number, item in enumerate(entries):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "item_reference":
            item = _referenced(item.get("id"), answers, f"input[{number}].id")
            kind = item["type"]
        if kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            open_turn = message["role"] == "assistant"
            if open_turn and reasoning:
                message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        elif kind == "reasoning":
            reasoning, open_turn = text_of(item.get("content")) or text_of(item.get("summary")), False
        elif kind == "function_call":
            if not open_turn:
                messages.append({"role": "assistant", "content": ""})
                if reasoning:
                    messages[-1]["reasoning_content"], reasoning = reasoning, ""
                open_turn = True
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            open_turn = False
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        else:
            kinds = "message, reasoning, function_call, function_call_output and item_reference"
            raise invalid(f"input[{number}]", item, kinds)
    return messages


def _referenced(item_id: Any, answers: Mapping[str, Message], location: str) -> dict[str, Any]:
    """The item of an earlier answer that has this id (:func:`_output`)."""
    name = str(item_id).partition("_")[2].partition("_")[0]
    for item in _output(answers[name], name) if name in answers else ():
        if item["id"] == item_id:
            return item
    raise invalid(location, item_id, "the id of an item of an earlier answer to this sample")


def _output(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    calls = message.get("tool_calls") or []
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content})
    if message["content"] or not calls:
        items.append(
            {
                "id": f"msg_{name}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": message["content"], "annotations": []}],
            }
        )
    items += [
        {
            "id": f"fc_{name}_{number}",
            "type": "function_call",
            "call_id": call["id"],
            "status": "completed",
            **call["function"],
        }
        for number, call in enumerate(calls)
    ]
    return items


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    position = {"item_id": item["id"], "output_index": index}
    kind = item["type"]
    empty: dict[str, Any] = {"arguments": ""} if kind == "function_call" else {"content": []}
    yield {"type": "response.output_item.added", "output_index": index, "item": {**item, **empty}}
    if kind == "function_call":
        text = item["arguments"]
        yield {"type": "response.function_call_arguments.delta", **position, "delta": text}
        yield {"type": "response.function_call_arguments.done", **position, "arguments": text, "name": item["name"]}
    else:
        [part] = item["content"]
        position["content_index"] = 0
        part_type = "output_text" if kind == "message" else "reasoning_text"
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield {"type": "response.content_part.added", **position, "part": {**part, "text": ""}}
        yield {"type": f"response.{part_type}.delta", **position, "delta": part["text"], **extra}
        yield {"type": f"response.{part_type}.done", **position, "text": part["text"], **extra}
        yield {"type": "response.content_part.done", **position, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _response(
    request: ChatRequest,
    choice: ChatChoice,
    body: Mapping[str, Any],
    name: str,
    time_s: int,
    output: list[dict[str, Any]],
) -> dict[str, Any]:
    cut = choice.finish == "length"
    output_tokens = len(choice.turn.ids)
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": time_s,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": request.parallel,
        "temperature": request.sampling.temperature,
        "top_p": request.sampling.top_p,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": choice.context,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": choice.context + output_tokens,
        },
    }
