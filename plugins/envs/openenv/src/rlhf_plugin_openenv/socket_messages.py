"""Messages of OpenEnv's web socket, with strict parsing of the answers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from rlhf.errors import EnvError, brief

MISFIT = ("missing", "extra_forbidden")
"""Types of pydantic's errors for an object whose fields differ from the model's."""


class InvalidAction(Exception):
    """The policy's text is not an action of this environment. The message is shown to the policy."""


class UnknownField(Exception):
    """The action has no field of the configured name."""


@dataclass(frozen=True)
class Observed:
    """The server's answer to ``reset`` or ``step``."""

    observation: dict[str, Any]
    reward: float
    done: bool

    def text(self, field: str | None) -> str:
        """The observation, or one field of it, as the policy reads it. Text is not quoted. Raises EnvError."""
        if field is None:
            return json.dumps(self.observation, ensure_ascii=False)
        if field not in self.observation:
            raise EnvError(
                f"the observation has no field {field!r} (observation_field); its fields are "
                f"{', '.join(self.observation) or 'none'}"
            )
        value = self.observation[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def action_of(text: str, field: str | None) -> dict[str, Any]:
    """The policy's text as an action. Raises InvalidAction."""
    if field is not None:
        return {field: text}
    try:
        action = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidAction(f"not JSON: {error}") from None
    if not isinstance(action, dict):
        raise InvalidAction("a JSON object is expected")
    return action


def message(kind: str, data: dict[str, Any] | None = None) -> str:
    """A message for the server. Raises EnvError for data that JSON cannot hold."""
    try:
        return json.dumps({"type": kind} if data is None else {"type": kind, "data": data}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EnvError(f"the {kind} message cannot be written as JSON: {error}") from None


def observed(answer: str | bytes, field: str | None) -> Observed:
    """The server's answer to ``reset`` or ``step``.

    Args:
        field: the action's field, if the policy's text is one field of it.

    Raises InvalidAction: the server refuses the action. UnknownField: the action has no such field. EnvError: any other
    answer than an observation.
    """
    try:
        content = json.loads(answer, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"the server answered {brief(answer)}, which is not JSON: {error}") from None
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, dict) or content.get("type") not in ("observation", "error"):
        raise EnvError(f"the server answered {brief(content)}; expected a message of the type observation or error")
    if content["type"] == "error":
        _raise(data, field)
    observation, reward, done = (data.get(name) for name in ("observation", "reward", "done"))
    if not isinstance(observation, dict):
        raise EnvError(f"the server answered observation = {brief(observation)}; expected an object")
    if type(done) is not bool:
        raise EnvError(f"the server answered done = {brief(done)}; expected true or false")
    if "reward" not in data or not (reward is None or (isinstance(reward, bool | int | float) and _is_finite(reward))):
        raise EnvError(f"the server answered reward = {brief(reward)}; expected a finite number, or null for none")
    return Observed(observation, float(reward or 0.0), done)


def _raise(data: dict[str, Any], field: str | None) -> None:
    code, text = data.get("code"), data.get("message")
    if code == "VALIDATION_ERROR":
        errors = [e for e in data.get("errors") or () if isinstance(e, dict)]
        reason = "; ".join(f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in errors) or str(text)
        if field is not None and any(e.get("type") in MISFIT for e in errors):
            raise UnknownField(reason)
        raise InvalidAction(reason)
    hint = ""
    if code == "CAPACITY_REACHED":
        hint = ". Set `concurrency` in [env] to the number of sessions that the server allows (max_concurrent_envs)"
    raise EnvError(f"the server answered the error {code}: {text}{hint}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
