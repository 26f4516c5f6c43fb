"""The OpenAI chat API in both directions: conversations as tokens, and a sampled answer as a message with reasoning and
tool calls.

Tool calls are read in the forms in which published chat templates write them. A form is looked for only if the chat
template contains its tag. docs/how-to/tools.md names the models of each.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.image_parts import text_of
from rlhf_runtime.data.messages import Messages, as_json
from rlhf_runtime.data.text_tokens import TextTokens
from rlhf_runtime.data.tokenizer import special_tokens

Tools = Sequence[Mapping[str, Any]]


class ChatMessages:
    """Encodes conversations with a chat template.

    Args:
        ends: texts of the tokens that end an answer.

    Messages are those of :func:`rlhf_runtime.data.messages.as_template_reads`. The methods raise DataError for messages
    that the template refuses.
    """

    def __init__(self, chat: ChatTemplate, tokens: TextTokens, ends: Sequence[str]) -> None:
        self._chat, self._tokens, self._ends = chat, tokens, tuple(end for end in ends if end)

    def encode(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """A whole conversation, which the policy can answer."""
        return self._tokens.ids(self._chat.text(messages, answer=True, tools=tools))

    def encode_following(self, messages: Messages, new: Messages, tools: Tools, closed: bool) -> list[int] | None:
        """What the template writes after an answer. The tokens up to its end are kept as they are.

        Args:
            messages: the messages up to the answer, which is the last one.
            new: the messages after it.
            closed: whether the sampled answer ended with its end token. If not, the tokens begin with it.

        Returns: None if the template writes ``messages`` otherwise once other messages follow, so that the tokens
            so far are not what the template would show the policy.
        """
        opened = self._chat.text(messages[:-1], answer=True, tools=tools)
        answered = self._chat.text(messages, answer=False, tools=tools)
        whole = self._chat.text([*messages, *new], answer=True, tools=tools)
        if not answered.startswith(opened) or not whole.startswith(answered):
            return None
        answer = answered[len(opened) :].rstrip()  # a line break may follow the end token
        end = max((e for e in self._ends if answer.endswith(e)), key=len, default="")
        if end:
            start = len(opened) + len(answer) - len(end)
        else:  # white space at its end was sampled if the message has it
            content = text_of(messages[-1].get("content"))
            start = len(opened) + len(answer)
            start += len(space) if answered.startswith(space := content[len(content.rstrip()) :], start) else 0
        added = whole[start:]
        if not end:  # some templates write the end token only once another message follows
            end = max((e for e in self._ends if added.lstrip().startswith(e)), key=len, default="")
        if not closed or not end:
            return self._tokens.ids(added) if end else self._tokens.ids_after(whole[:start], added)
        return self._tokens.ids_after(end, added.partition(end)[2])


_OPEN, _CLOSE = "<think>", "</think>"
_PROBE_ARGUMENTS = {"city": "Paris", "days": 3}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "The weather of the next days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city."},
                "days": {"type": "integer", "description": "How many days."},
            },
            "required": ["city", "days"],
        },
    },
}


class ParsedAnswers:
    """Parses answers with the tokenizer's ``response_template``. Without one, reasoning in ``<think>`` and calls in the
    forms of :data:`FORMS` are found if the chat template contains their tags; all else is
    content.

    Raises DataError: the ``response_template`` is not valid.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        templates = tokenizer.chat_template  # a text, or several by name, such as the one for tools
        source = templates if isinstance(templates, str) else "".join(templates.values())
        self._own = getattr(tokenizer, "response_template", None) is not None
        self._thinks = _CLOSE in source
        self._forms = [form for form in FORMS if form[0] in source]
        if self._own:
            try:
                tokenizer.get_response_parser(prefix="")
            except Exception as error:  # of the template, which somebody wrote for this tokenizer
                raise DataError(
                    f"the tokenizer's response_template is not valid: {type(error).__name__}: {error}. Correct or "
                    "remove it in tokenizer_config.json."
                ) from error
        visible = (_OPEN, _CLOSE, *TAGS)
        self._hidden = frozenset(i for token, i in special_tokens(tokenizer).items() if token not in visible)

    def parse(
        self, ids: Sequence[int], prompt: Sequence[int], key: object, tools: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """The assistant message.

        Args:
            prompt: tokens before the answer, at least from the text that opens it. It may begin with ``<think>``.
            key: the ids of tool calls are made from it. Equal keys give equal ids.
        """
        if self._own:
            content, reasoning, calls = self._by_template(ids, prompt, tools)
        else:
            content, reasoning, calls = self._by_tags(self._text(ids), self._text(prompt[-16:]), tools)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": _id(key, n), "type": "function", "function": {"name": name, "arguments": arguments}}
                for n, (name, arguments) in enumerate(calls)
            ]
        return message

    def check_tools(self, chat: ChatTemplate, tokens: TextTokens) -> None:
        """Raises DataError if the chat template does not write the descriptions of tools, or if a call as it writes it
        is not parsed back. The policy would never know of the tools, or they would never be called."""
        question = [{"role": "user", "content": "Will it rain in Paris?"}]
        opened, closed = (chat.text(question, answer, [_PROBE_TOOL]) for answer in (True, False))
        if opened == chat.text(question, True):
            raise DataError(
                "the chat template does not write the descriptions of tools, so the policy would never know of them. "
                "Use a model whose chat template writes them, or name a file with such a template as "
                "data.chat_template."
            )
        call = {"id": _id("", 0), "type": "function", "function": {"name": "forecast", "arguments": _PROBE_ARGUMENTS}}
        answered = chat.text(
            [*question, {"role": "assistant", "content": "", "tool_calls": [call]}], False, [_PROBE_TOOL]
        )
        before = next((text for text in (opened, closed) if answered.startswith(text)), "")
        call_text = answered[len(before) :]
        message = self.parse(tokens.ids(call_text), tokens.ids(before), "", [_PROBE_TOOL])
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if [(c["name"], _value(c["arguments"])) for c in calls] != [("forecast", _PROBE_ARGUMENTS)]:
            raise DataError(
                f"the chat template writes the call forecast(city='Paris', days=3) as {call_text[-200:]!r}; read "
                f"from this as an answer: {calls or 'no call'}, so tools would never be called. "
                "Calls are read by the tokenizer's response_template, else in the forms of docs/how-to/tools.md, such "
                "as JSON with name and arguments in <tool_call> ... </tool_call>. Add a response_template to "
                "tokenizer_config.json, or name a file with a template that writes calls so as data.chat_template."
            )

    def _by_template(
        self, ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, str, list[tuple[str, str]]]:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        before = self._tokenizer.decode(list(prompt), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        try:
            parsed = self._tokenizer.parse_response(text, prefix=before, tools=[dict(t) for t in tools] or None)
        except Exception:  # the model wrote something that is not in the format: it stays content
            return self._text(ids), "", []
        reasoning = parsed.get("reasoning_content") or parsed.get("thinking") or parsed.get("reasoning") or ""
        calls = []
        for call in parsed.get("tool_calls") or []:
            function = call.get("function", call)
            calls.append((function["name"], as_json(function.get("arguments") or {})))
        return parsed.get("content") or "", reasoning, calls

    def _by_tags(
        self, text: str, before: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, str, list[tuple[str, str]]]:
        reasoning, content = "", text
        if self._thinks:
            opened = before.rstrip().endswith(_OPEN) or text.lstrip().startswith(_OPEN)
            if opened or (_CLOSE in text and _OPEN not in text.partition(_CLOSE)[0]):
                reasoning, _, content = text.partition(_CLOSE)  # without an end, all of it is reasoning
                reasoning, content = reasoning.strip().removeprefix(_OPEN).strip("\n"), content.lstrip("\n")
        content, calls = read_calls(content, self._forms, argument_types(tools))
        return content, reasoning, calls

    def _text(self, ids: Sequence[int]) -> str:
        """Text without special tokens, except tags."""
        visible_ids = [i for i in ids if i not in self._hidden]
        text: str = self._tokenizer.decode(visible_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _id(key: object, number: int) -> str:
    """Nine letters and digits, the only form that every chat template accepts."""
    return hashlib.sha256(f"{key}/{number}".encode()).hexdigest()[:9]


Call = tuple[str, str]
"""Name, and arguments as JSON text."""
Types = Mapping[tuple[str, str], Any]
"""{(function, argument): its type in the schema of the function}."""
Reader = Callable[[str, Types], list[Call]]
"""Reads the calls in a text that matches the pattern of a form; none if the text is no call."""

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
    results = [_object(call) for call in calls] if isinstance(calls, list) else []
    return [call for result in results for call in result] if all(results) else []


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
"""(text that is in each chat template with this form, pattern of a call in an answer, reader of what it matches)."""
TAGS = (
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>"),
    *("<｜tool▁calls▁begin｜>", BEGIN, SEPARATOR, END, "<｜tool▁calls▁end｜>"),
)
"""The tags of these forms. Some tokenizers have them among their special tokens."""


def read_calls(text: str, forms: Sequence[tuple[str, re.Pattern[str], Reader]], types: Types) -> tuple[str, list[Call]]:
    """The text without its calls, and the calls. Of several forms, the first one with a call."""
    for _, pattern, reader in forms:
        calls: list[Call] = []
        rest, position = [], 0
        for match in pattern.finditer(text):
            if calls_of_match := reader(match[1], types):
                calls += calls_of_match
                rest.append(text[position : match.start()])
                position = match.end()
        if calls:
            return "".join([*rest, text[position:]]).strip(), calls
    return text, []
