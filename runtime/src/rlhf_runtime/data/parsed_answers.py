"""A sampled answer as an assistant message of the OpenAI chat API: content, reasoning, tool calls."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.data.call_forms import FORMS, TAGS, argument_types, read_calls
from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.messages import as_json
from rlhf_runtime.data.text_tokens import TextTokens

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
    forms of :mod:`rlhf_runtime.data.call_forms` are found if the chat template contains their tags; all else is
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
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._hidden = frozenset(i for token, i in special.items() if token not in (_OPEN, _CLOSE, *TAGS))

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
        written = answered[len(before) :]
        message = self.parse(tokens.ids(written), tokens.ids(before), "", [_PROBE_TOOL])
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if [(c["name"], _value(c["arguments"])) for c in calls] != [("forecast", _PROBE_ARGUMENTS)]:
            raise DataError(
                f"the chat template writes the call forecast(city='Paris', days=3) as {written[-200:]!r}; read "
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
        shown = [i for i in ids if i not in self._hidden]
        text: str = self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _id(key: object, number: int) -> str:
    """Nine letters and digits, the only form that every chat template accepts."""
    return hashlib.sha256(f"{key}/{number}".encode()).hexdigest()[:9]
