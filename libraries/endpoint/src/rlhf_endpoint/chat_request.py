"""A request in one form for all APIs: its content, the reading of shared fields, and the errors that answer it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import RolloutContext
from rlhf.types import Sampling, Turn

from rlhf_endpoint.config import ProgramConfig


class ApiError(Exception):
    """An error that is returned to the program. The sample continues."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, value: Any, allowed: str) -> ApiError:
    """The error for a field with a value that is not allowed."""
    return ApiError(400, f"{param} is {value!r:.100}; allowed: {allowed}", param, "invalid_value")


MOST_CHOICES = 8
_NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "ignore_eos": False,
}
"""{field that changes the distribution of answers: the value with which it does not}."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for answers to a conversation."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    sampling: Sampling
    model: str
    choices: int = 1
    calls: bool = True
    """Whether tool calls are read from the answer: the request has tools, and ``tool_choice`` allows calls."""
    parallel: bool = True
    """Whether an answer may have several calls. Otherwise the client receives only the first one."""
    stop: tuple[str, ...] = ()
    stream: bool = False


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """An answer."""

    turn: Turn
    message: Mapping[str, Any]
    context: int
    """Tokens before the answer."""

    @property
    def finish(self) -> str:
        if self.turn.finish == "length":
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"


def read_model(body: Mapping[str, Any], config: ProgramConfig) -> str:
    model = body.get("model")
    if model not in config.models:
        names = ", ".join(config.models)
        message = f"the model {model!r:.100} does not exist; available: {names} (option rollout.models)"
        raise ApiError(404, message, "model", "model_not_found")
    return str(model)


def read_sampling(
    body: Mapping[str, Any], config: ProgramConfig, ctx: RolloutContext, limits: tuple[str, ...]
) -> tuple[Sampling, tuple[str, ...]]:
    """Sampling parameters, and the stop strings of the request.

    Args:
        limits: names of the field with the maximum number of tokens.
    """
    sampling = ctx.sampling
    for name in limits:
        if (limit := body.get(name)) is not None:
            if type(limit) is not int or limit < 1:
                raise invalid(name, limit, "an integer of at least 1")
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, limit))
    stop = body.get("stop")
    stops = (
        () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else None
    )
    if stops is None or not all(isinstance(s, str) and s for s in stops):
        raise invalid("stop", stop, "a string or a list of strings, none of them empty")
    sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *stops))))
    if config.sampling == "request":
        # Neither an evaluation nor the greedy answer to a prompt, which the run samples greedily in any case.
        trained = ctx.training and ctx.sampling.temperature > 0
        sampling = replace(sampling, temperature=_temperature(body, sampling, trained))
        for name, default in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if (value := body.get(name)) is not None:
                if trained and (isinstance(value, bool) or value not in (default, getattr(ctx.sampling, name))):
                    raise _other_distribution(name, value, f"{default} or the run's {getattr(ctx.sampling, name)}")
                option: dict[str, Any] = {name: _number(name, value, type(default))}
                sampling = replace(sampling, **option)
        try:
            ctx.check_sampling(sampling)
        except (ConfigError, CapabilityError) as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        for name, neutral in _NEUTRAL.items():
            if body.get(name) not in (None, neutral):
                raise _other_distribution(name, body[name], json.dumps(neutral))
        for name in ("logit_bias", "bad_words"):
            if body.get(name):
                raise _other_distribution(name, body[name], "none")
    return sampling, stops


def _temperature(body: Mapping[str, Any], sampling: Sampling, trained: bool) -> float:
    value = body.get("temperature")
    if value is None:
        return sampling.temperature
    in_range = type(value) in (int, float) and 0 <= value <= 2
    if trained and not (in_range and value):
        raise _other_distribution("temperature", value, "above 0, at most 2")
    if not in_range:
        raise invalid("temperature", value, "a number from 0 to 2")
    return float(value)


def _number(name: str, value: Any, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(value) if type(value) in (int, float) else None
    except (OverflowError, ValueError):  # infinity or NaN as an integer, or too many digits
        number = None
    if number is None or number != value:
        raise invalid(name, value, "an integer" if kind is int else "a number")
    return number


def _other_distribution(name: str, value: Any, allowed: str) -> ApiError:
    reason = "because training needs the distribution that samples were drawn from"
    advice = "With the option rollout.sampling = 'run' it is ignored in favour of [sampling]"
    return invalid(name, value, f"{allowed}, {reason}. {advice}")


def read_tools(tools: Any, choice: Any) -> tuple[list[dict[str, Any]], bool]:
    """Descriptions of functions, and whether calls may be made."""
    if tools is not None and not isinstance(tools, list):
        raise invalid("tools", tools, "a list")
    for number, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{number}]", tool, "a function: {type: 'function', function: {name, parameters}}")
        if not isinstance(parameters := function.get("parameters") or {}, Mapping):
            raise invalid(f"tools[{number}].function.parameters", parameters, "an object, which is a JSON schema")
    if choice not in (None, "auto", "none"):
        reason = "A forced call is sampled from fewer tokens than those over which training computes log-probs"
        raise invalid("tool_choice", choice, f"'auto' or 'none'. {reason}. Ask for the call in a message instead")
    return list(tools or []), bool(tools) and choice != "none"


def read_flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, value, "true or false")
    return default if value is None else value
