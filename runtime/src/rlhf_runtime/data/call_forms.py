"""The forms in which published chat templates write tool calls, and how a call is read from a sampled text.

A form is looked for only if the chat template contains its tag. docs/how-to/tools.md names the models of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_runtime.data.messages import as_json

Call = tuple[str, str]
"""Name, and arguments as JSON text."""
Types = Mapping[tuple[str, str], Any]
"""{(function, argument): its type in the schema of the function}."""
Reader = Callable[[str, Types], list[Call]]
"""The calls in what a form's pattern found; none if it is no call."""

BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = re.compile(r"```json\n(.*?)\n?```", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
# A value ends before the next opening tag, so that a text that repeats one is read in linear time.
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>", re.DOTALL)


def argument_types(tools: Sequence[Mapping[str, Any]]) -> Types:
    """The types of all arguments, for forms that write values as text."""
    functions = [tool.get("function", tool) for tool in tools]
    return {
        (function.get("name", ""), argument): schema.get("type")
        for function in functions
        for argument, schema in ((function.get("parameters") or {}).get("properties") or {}).items()
        if isinstance(schema, Mapping)
    }


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the policy may nest lists deeper than Python reads
        return None


def _object(call: Any) -> list[Call]:
    """``{"name": ..., "arguments": {...}}``; some templates say ``parameters``."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return []
    arguments = call.get("arguments", call.get("parameters", {}))
    return [(call["name"], as_json(arguments))] if isinstance(arguments, dict) else []


def _typed(name: str, pairs: Sequence[tuple[str, str]], types: Types) -> list[Call]:
    """A call whose values are text: JSON, except where the schema says that the argument is a string."""
    values = {}
    for key, text in pairs:
        value = None if types.get((name, key)) == "string" else _decoded(text)
        values[key] = text if value is None and text.strip() != "null" else value
    return [(name, as_json(values))]


def _tagged(text: str, types: Types) -> list[Call]:
    """JSON (Hermes, Qwen), ``<function=...>`` (Qwen3-Coder) or the name and ``<arg_key>`` (GLM)."""
    if function := _FUNCTION.fullmatch(text):
        return _typed(function[1].strip(), _PARAMETER.findall(function[2]), types)
    if "<arg_key>" in text:
        return _typed(text.partition("<arg_key>")[0].strip(), _ARGUMENT.findall(text), types)
    return _object(_decoded(text))


def _listed(text: str, types: Types) -> list[Call]:
    """A JSON list of calls, or the name and the arguments (``add[ARGS]{...}``)."""
    name, separator, arguments = text.partition("[ARGS]")
    if separator:
        return _object({"name": name.strip(), "arguments": _decoded(arguments)})
    calls = _decoded(text)
    read = [_object(call) for call in calls] if isinstance(calls, list) else []
    return [call for found in read for call in found] if all(read) else []


def _separated(text: str, types: Types) -> list[Call]:
    """DeepSeek: ``function SEPARATOR name`` and fenced JSON, or ``name SEPARATOR JSON``."""
    before, _, after = text.partition(SEPARATOR)
    if fenced := _FENCE.search(after):
        return _object({"name": after[: fenced.start()].strip(), "arguments": _decoded(fenced[1])})
    return _object({"name": before.strip(), "arguments": _decoded(after)})


def _bare(text: str, types: Types) -> list[Call]:
    """An answer that is one JSON object and nothing else (Llama 3). Any other object is an answer in JSON."""
    call = _decoded(text)
    return _object(call) if isinstance(call, dict) and "parameters" in call else []


FORMS: Sequence[tuple[str, re.Pattern[str], Reader]] = (
    ("<tool_call>", re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL), _tagged),
    ("[TOOL_CALLS]", re.compile(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL), _listed),
    ("<|tool_call|>", re.compile(r"<\|tool_call\|>(.*?)(?:<\|/tool_call\|>|\Z)", re.DOTALL), _listed),
    (BEGIN, re.compile(f"(?:<｜tool▁calls▁begin｜>)?{BEGIN}(.*?)(?:{END}|\\Z)(?:\\s*<｜tool▁calls▁end｜>)?", re.DOTALL),
     _separated),
    ('"parameters": ', re.compile(r"\A\s*(?:<\|python_tag\|>)?(\{.*\})\s*\Z", re.DOTALL), _bare),
)  # fmt: skip
"""(text of the chat template that shows that it writes calls so, pattern of one call in an answer, its reader)."""
TAGS = (
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>"),
    *("<｜tool▁calls▁begin｜>", BEGIN, SEPARATOR, END, "<｜tool▁calls▁end｜>"),
)
"""Tokens that forms consist of, which tokenizers may call special."""


def read_calls(text: str, forms: Sequence[tuple[str, re.Pattern[str], Reader]], types: Types) -> tuple[str, list[Call]]:
    """The text without its calls, and the calls. Of several forms, the first one with a call."""
    for _, pattern, reader in forms:
        calls: list[Call] = []
        rest, position = [], 0
        for match in pattern.finditer(text):
            if read := reader(match[1], types):
                calls += read
                rest.append(text[position : match.start()])
                position = match.end()
        if calls:
            return "".join([*rest, text[position:]]).strip(), calls
    return text, []
