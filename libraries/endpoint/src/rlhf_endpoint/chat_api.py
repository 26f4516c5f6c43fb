"""``/v1/chat/completions``: requests and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_endpoint.chat_request import (
    MOST_CHOICES,
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

LIMITS = ("max_tokens", "max_completion_tokens")
_FORMS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf"),
)
"""Fields by which requests to vLLM and SGLang restrict the form of answers."""


def read(body: Mapping[str, Any], config: ProgramConfig, session: Session) -> ChatRequest:
    """Raises ApiError."""
    model = read_model(body, config)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise invalid("messages", messages, "a list of at least one message")
    if body.get("functions") or body.get("function_call"):
        raise invalid("functions", body.get("functions"), "use tools and tool_choice")
    kind = body.get("response_format")
    if kind is not None and (not isinstance(kind, Mapping) or kind.get("type") != "text"):
        raise invalid("response_format", kind, "{type: 'text'}")
    for field in _FORMS:
        if body.get(field):
            raise invalid(field, body[field], "none: answers are text")
    if body.get("top_logprobs"):
        raise invalid("top_logprobs", body["top_logprobs"], "0")
    if not isinstance(options := body.get("stream_options") or {}, Mapping):
        raise invalid("stream_options", options, "an object")
    choices = body.get("n", 1)
    if type(choices) is not int or not 1 <= choices <= MOST_CHOICES:
        raise invalid("n", choices, f"1 to {MOST_CHOICES}")
    tools, calls = read_tools(body.get("tools"), body.get("tool_choice"))
    parallel = read_flag(body, "parallel_tool_calls", default=True)
    sampling, stop = read_sampling(body, config, session.ctx, LIMITS)
    return ChatRequest(messages, tools, sampling, model, choices, calls, parallel, stop, read_flag(body, "stream"))


def answer(
    request: ChatRequest, choices: Sequence[ChatChoice], body: Mapping[str, Any], name: str, time_s: int
) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    return {
        **_head(request, name, time_s, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": {"refusal": None, **_message(choice)},
                "finish_reason": choice.finish,
                "logprobs": _logprobs(choice) if body.get("logprobs") else None,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": usage(choices),
    }


def chunks(
    request: ChatRequest, choices: Sequence[ChatChoice], body: Mapping[str, Any], name: str, time_s: int
) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer."""
    head = _head(request, name, time_s, "chat.completion.chunk")
    has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    no_usage = {"usage": None} if has_usage else {}
    for index, choice in enumerate(choices):
        message = _message(choice)
        calls = message.pop("tool_calls", [])
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{field: message[field]} for field in ("reasoning_content", "content") if message.get(field)]
        deltas += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(calls)]
        for number, delta in enumerate([*deltas, {}]):
            last = number == len(deltas)
            part = {
                "index": index,
                "delta": delta,
                "finish_reason": choice.finish if last else None,
                "logprobs": _logprobs(choice) if last and body.get("logprobs") else None,
            }
            yield {**head, "choices": [part], **no_usage}
    if has_usage:
        yield {**head, "choices": [], "usage": usage(choices)}


def usage(choices: Sequence[ChatChoice]) -> dict[str, int]:
    prompt, completion = choices[0].context, sum(len(c.turn.ids) for c in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _head(request: ChatRequest, name: str, time_s: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{name}", "object": kind, "created": time_s, "model": request.model}


def _message(choice: ChatChoice) -> dict[str, Any]:
    message = dict(choice.message)
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def _logprobs(choice: ChatChoice) -> dict[str, Any]:
    """The log-probs of an answer. Tokens are written as ids, because different tokens may have equal texts."""
    values = zip(choice.turn.ids, choice.turn.logprobs or (), strict=False)
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{i}", "logprob": p, "bytes": None, "top_logprobs": []} for i, p in values
    ]
    return {"content": content, "refusal": None}
