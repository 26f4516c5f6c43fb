"""Environment: tasks of a NeMo Gym resources server, over HTTP."""

from __future__ import annotations

import json
import math
import re
import ssl
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import httpx
from pydantic import Field, field_validator
from rlhf import hookimpl
from rlhf.errors import EnvError, brief
from rlhf.interfaces import ComponentConfig, Env
from rlhf.types import EnvStep, Row

PARAMS = "responses_create_params"
LONGEST = 10 * 2**20
"""Largest size of an answer in bytes. A larger one is refused."""
ERROR_STATUSES = (400, 422)
"""Status codes with which a tool refuses its arguments. The answer is shown to the policy."""


class NemoGymConfig(ComponentConfig):
    url: str
    """Address of the resources server, such as ``http://127.0.0.1:8000``."""
    max_steps: Annotated[int, Field(gt=0)] = 8
    """Number of the policy's turns after which the episode is verified in its current state. ``[env] max_turns`` must
    not be smaller, because it ends an episode without a reward."""

    @field_validator("url")
    @classmethod
    def _web_address(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is not a web address: it must begin with http:// or https://")
        return url.rstrip("/")


class NemoGym(Env):
    """Tasks of a NeMo Gym resources server. The session is seeded with the row. The server executes the tool calls in
    the policy's text. A turn without a tool call ends the episode, and ``/verify`` returns the reward.
    """

    name = "nemo_gym"
    source = "NeMo Gym 0.4.0, https://github.com/NVIDIA-NeMo/Gym"
    Config = NemoGymConfig
    layout = frozenset({"url"})

    _client: httpx.AsyncClient | None = None

    async def reset(self, row: Row, seed: int) -> str:
        params = row.get(PARAMS)
        if not isinstance(params, dict):
            raise EnvError(
                f"row {row.index} of source {row.source!r}: its column {PARAMS!r} is {brief(params)}; expected an "
                "object"
            )
        self._row, self._tools = dict(row.columns), params.get("tools") or []
        self._names = {
            tool["name"] for tool in self._tools if isinstance(tool, dict) and isinstance(tool.get("name"), str)
        }
        self._output: list[dict[str, Any]] = []
        self._turn = 0
        verify = _certificates() if self.config.url.startswith("https") else False
        self._client = httpx.AsyncClient(timeout=None, verify=verify)  # the deadline of [env] limits each call
        await self._post("seed_session", self._row)
        return ""

    async def step(self, action: str) -> EnvStep:
        answer = parsed(action, self._turn, self._names)
        self._output += answer.items(self._turn)
        self._turn += 1
        results = await self._results(answer)
        if not answer.calls or self._turn >= self.config.max_steps:
            return await self._verified()
        return EnvStep(shown_results(results))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _results(self, answer: PolicyTurn) -> list[str]:
        results = []
        for call in answer.calls:
            result = (
                json.dumps({"error": call.problem})
                if call.problem
                else await self._post(call.name, call.arguments, ERROR_STATUSES)
            )
            self._output.append(output_item(call, result))
            results.append(result)
        return results

    async def _verified(self) -> EnvStep:
        request = self._row | {"response": response(self._output, self._tools)}
        body = await self._post("verify", request)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise EnvError(f"{self.config.url}/verify answered {body[:80]!r}, which is not JSON: {error}") from None
        reward = answer.get("reward") if isinstance(answer, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not _is_finite(reward):
            raise EnvError(f"{self.config.url}/verify answered reward = {brief(reward)}; expected a finite number")
        numbers = {k: v for k, v in answer.items() if isinstance(v, int | float) and k not in request and k != "reward"}
        return EnvStep("", float(reward), True, info={k: v for k, v in numbers.items() if _is_finite(v)})

    async def _post(self, path: str, body: Any, statuses: tuple[int, ...] = ()) -> str:
        """The text of the server's answer. Raises EnvError unless the status is 200 or in ``statuses``."""
        url = f"{self.config.url}/{path}"
        if self._client is None:
            raise EnvError(f"{url}: the episode has not been reset")
        try:
            content = json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EnvError(f"{url}: the row cannot be written as JSON: {error}") from None
        try:
            async with self._client.stream(
                "POST", url, content=content, headers={"Content-Type": "application/json"}
            ) as answer:
                data = b""
                async for part in answer.aiter_bytes():
                    data += part
                    if len(data) > LONGEST:
                        raise EnvError(f"{url} answered more than {LONGEST // 2**20} MiB")
        except (httpx.HTTPError, OSError) as error:
            raise EnvError(f"{url}: {error or type(error).__name__}") from error
        text = data.decode(errors="replace")
        if answer.status_code not in (200, *statuses):
            raise EnvError(f"{url} answered with HTTP status {answer.status_code}: {text[:200]!r}")
        return text


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes longer than a request


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
CALL_END = "</tool_call>"
THOUGHT = "</think>"


@dataclass(frozen=True)
class ToolCall:
    """One call in the policy's text. ``problem`` says what is wrong with it; such a call is not executed."""

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str = ""


@dataclass(frozen=True)
class PolicyTurn:
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


def parsed(text: str, number: int, tools: set[str]) -> PolicyTurn:
    """The turn with this number. Tool calls are JSON in ``<tool_call>`` tags, as Qwen and Hermes models write them."""
    reasoning, _, rest = text.rpartition(THOUGHT)
    # after the last closing tag, each unclosed tag would be searched to the end of the text: quadratic time
    front, end, tail = rest.rpartition(CALL_END)
    bodies = CALL.findall(front + end)
    calls = [_call(body, f"call_{number}_{n}", tools) for n, body in enumerate(bodies)]
    content = CALL.sub("", front + end) + tail
    return PolicyTurn(reasoning.replace("<think>", "").strip(), content.strip(), tuple(calls))


def shown_results(results: list[str]) -> str:
    """Tool results in the format of these models' chat templates."""
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


@hookimpl
def rlhf_register_env() -> list[type]:
    return [NemoGym]
