"""The policy's text as items of the Responses API, and tool results as text for the policy."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
CALL_END = "</tool_call>"
THOUGHT = "</think>"


@dataclass(frozen=True)
class ToolCall:
    """One call in the policy's text. ``problem`` says what is wrong with it; such a call is not made."""

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str = ""


@dataclass(frozen=True)
class Answer:
    """One turn of the policy."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]

    def items(self, number: int) -> list[dict[str, Any]]:
        """The turn as output items of a response. Calls with a problem are items too, with the arguments ``{}``."""
        outputs: list[dict[str, Any]] = []
        if self.reasoning:
            summary = [{"type": "summary_text", "text": self.reasoning}]
            outputs.append({"type": "reasoning", "id": f"reasoning_{number}", "summary": summary})
        if self.content or not self.calls:
            part = {"type": "output_text", "text": self.content, "annotations": []}
            message = {"type": "message", "id": f"message_{number}", "role": "assistant", "status": "completed"}
            outputs.append(message | {"content": [part]})
        for call in self.calls:
            item = {"type": "function_call", "id": call.id, "call_id": call.id, "name": call.name}
            outputs.append(item | {"arguments": json.dumps(call.arguments), "status": "completed"})
        return outputs


def parsed(text: str, number: int, tools: set[str]) -> Answer:
    """The turn with this number. Tool calls are JSON in ``<tool_call>`` tags, as Qwen and Hermes models write them."""
    reasoning, _, rest = text.rpartition(THOUGHT)
    # behind the last end, every tag without an end would be searched to the end of the text: quadratic time
    front, end, behind = rest.rpartition(CALL_END)
    bodies = CALL.findall(front + end)
    calls = [_call(body, f"call_{number}_{n}", tools) for n, body in enumerate(bodies)]
    content = CALL.sub("", front + end) + behind
    return Answer(reasoning.replace("<think>", "").strip(), content.strip(), tuple(calls))


def shown_results(results: list[str]) -> str:
    """Tool results as the chat templates of these models write them."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def output_item(call: ToolCall, result: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.id, "output": result}


def response(output: list[dict[str, Any]], tools: list[Any]) -> dict[str, Any]:
    """A whole response object of the Responses API."""
    fixed = {"id": "response", "object": "response", "created_at": 0, "model": "policy", "status": "completed"}
    return fixed | {"output": output, "parallel_tool_calls": True, "tool_choice": "auto", "tools": tools}


def _call(body: str, call_id: str, tools: set[str]) -> ToolCall:
    try:
        data = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return ToolCall(call_id, "", {}, f"the tool call is not JSON: {error}")
    name = data.get("name") if isinstance(data, dict) else None
    arguments = data.get("arguments", {}) if isinstance(data, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(call_id, "", {}, 'a tool call is {"name": text, "arguments": object}')
    if name not in tools:  # the server also has paths that are not tools, such as /verify
        return ToolCall(call_id, name, arguments, f"no tool {name!r}; tools: {', '.join(sorted(tools)) or 'none'}")
    return ToolCall(call_id, name, arguments)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
