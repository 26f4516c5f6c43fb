"""A tool as the policy sees it, and the conversion of its results to text."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

ALLOWED = "text, or a JSON value: numbers (finite), true, false, null, lists and dicts with text as keys"

LONGEST_ERROR = 2000
"""Largest number of characters of an error message."""


class ToolError(Exception):
    """A call that failed in a way that the policy can learn from. Its message, truncated to :data:`LONGEST_ERROR`, is
    the result of the call."""

    def __init__(self, message: str) -> None:
        super().__init__(message[:LONGEST_ERROR])


class Tool(ABC):
    """Something that the policy can call."""

    name: str
    source: str
    """Origin of the tool, for messages."""
    schema: dict[str, Any]
    """``{"type": "function", "function": {"name", "description", "parameters": JSON schema}}``, the form for chat
    templates."""

    @abstractmethod
    async def call(self, arguments: str, timeout: float, longest: int) -> str:
        """Call the tool.

        Args:
            arguments: a JSON object.
            timeout: seconds for this call.
            longest: largest number of characters of the result; a longer result is cut.

        Raises ToolError: the policy reads its message. Raises RolloutError: the sample fails.
        """


def schema_of(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def too_slow(name: str, timeout: float) -> ToolError:
    return ToolError(f"{name!r} took longer than {timeout:g} s and was stopped")


def raised(name: str, error: BaseException) -> ToolError:
    """The ToolError for an exception in a function, with the text that the policy reads."""
    return ToolError(f"{name!r} raised {type(error).__name__}: {error}")


def invalid_arguments(name: str, problems: Iterable[tuple[Iterable[object], str]]) -> ToolError:
    """Args:
    problems: [(path of the argument, what is wrong with it), ...].
    """
    text = "; ".join(": ".join(filter(None, (".".join(map(str, path)), message))) for path, message in problems)
    return ToolError(f"invalid arguments for {name!r}: {text}")


def as_text(name: str, value: object, longest: int) -> str:
    """The result of a call as the policy reads it: text as it is, anything else as JSON.

    Raises ToolError: ``value`` is neither.
    """
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        if not isinstance(value, str):
            _check_keys(value)
        text[:longest].encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"{name!r} returned {type(value).__name__} ({error}). A tool may return {ALLOWED}") from None
    return cut(text, longest)


def cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}\n[cut: {longest} of {len(text)} characters]"


def _check_keys(value: object) -> None:
    """Raises TypeError for keys that are not text, which json.dumps would convert."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a key is {type(key).__name__}")
            _check_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)
