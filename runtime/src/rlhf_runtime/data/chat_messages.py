"""The OpenAI chat API in both directions: conversations as tokens, and a sampled answer as a message with reasoning and
tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from rlhf.errors import DataError
from rlhf.types import Turn

from rlhf_runtime.data.call_forms import (
    CHANNELS,
    FORMS,
    AnswerCall,
    CallForm,
    argument_types,
    calls_in_objects,
    read_calls,
    read_channels,
)
from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.learned_calls import CALL_IDS, PROBE_TOOLS, Call, learned_form
from rlhf_runtime.data.messages import Messages, as_people_read, as_template_reads, text_of
from rlhf_runtime.data.row_images import RowImages
from rlhf_runtime.data.strict_json import decoded
from rlhf_runtime.data.text_tokens import TextTokens
from rlhf_runtime.data.tokenizer import decoder_of, special_tokens

Tools = Sequence[Mapping[str, Any]]


class ChatMessages:
    """Encodes conversations with a chat template, and parses answers.

    Args:
        ends: texts of the tokens that end an answer.

    Raises DataError: the tokenizer's ``response_template`` is not valid. The methods raise DataError if the template
    refuses messages, or leaves out a message that the policy did not write.
    """

    def __init__(
        self, tokenizer: Any, chat: ChatTemplate, tokens: TextTokens, images: RowImages, ends: Sequence[str]
    ) -> None:
        self._chat, self._tokens, self._images = chat, tokens, images
        self._ends = tuple(end for end in ends if end)
        self.answers = ParsedAnswers(tokenizer, chat, tokens)

    def encode(self, messages: Messages, tools: Tools = ()) -> Turn:
        """The tokens of a whole conversation, up to where the policy answers."""
        if tools:
            self.answers.check_tools()
        conversation, images = as_template_reads(messages)
        files = self._images.files(images)
        chat = self._chat.with_tools(tools)
        chat.check_context(conversation)
        return self._images.turn(
            self._tokens.ids(chat.text(conversation, answer=True)), files, as_people_read(conversation)
        )

    def encode_following(
        self, messages: Messages, answer: Mapping[str, Any], following: Messages, tools: Tools = (), closed: bool = True
    ) -> Turn | None:
        """The tokens that the template writes after a sampled answer. The tokens up to the end of the answer are kept
        unchanged.

        Args:
            closed: whether the sampled answer ended with its end token. If not, the tokens begin with it.

        Returns: None if the template writes ``messages`` differently once other messages follow. Then the existing
        tokens are not the tokens that the template would show the policy.
        """
        new, images = as_template_reads(following)
        conversation, _ = as_template_reads([*messages, answer])
        files = self._images.files(images)
        ids = self._ids_after(conversation, new, tools, closed)
        return None if ids is None else self._images.turn(ids, files, as_people_read(new))

    def _ids_after(self, messages: Messages, new: Messages, tools: Tools, closed: bool) -> list[int] | None:
        """The tokens of ``new`` messages after an answer, which is the last of ``messages``."""
        chat = self._chat.with_tools(tools)
        chat.check_context([*messages, *new], start=len(messages))
        opened, answered = chat.text(messages[:-1], answer=True), chat.text(messages, answer=False)
        text = chat.text([*messages, *new], answer=True)
        if not answered.startswith(opened) or not text.startswith(answered):
            return None
        answer = answered[len(opened) :].rstrip()  # a line break may follow the end token
        end = max((e for e in self._ends if answer.endswith(e)), key=len, default="")
        if end:
            start = len(opened) + len(answer) - len(end)
        else:  # white space at its end was sampled if the message contains it
            content = text_of(messages[-1].get("content"))
            start = len(opened) + len(answer)
            start += len(space) if answered.startswith(space := content[len(content.rstrip()) :], start) else 0
        added = text[start:]
        if not end:  # some templates write the end token only once another message follows
            end = max((e for e in self._ends if added.lstrip().startswith(e)), key=len, default="")
        if not closed or not end:
            return self._tokens.ids(added) if end else self._tokens.ids_after(text[:start], added)
        return self._tokens.ids_after(end, added.partition(end)[2])


_THOUGHTS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
"""The texts around reasoning: for most models, Seed-OSS, MiniMax M3, Magistral, Command A, Gemma 4 and Apriel."""
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
    """Parses answers with the tokenizer's ``response_template``. Without one, reasoning in ``<think>`` or similar tags,
    and calls in the forms of :data:`FORMS` and of gpt-oss, are parsed if the chat template contains their tags. If none
    of these forms can read a call that the template writes, the template's form is learned (:func:`learned_form`). All
    other text is content.

    Raises DataError: the ``response_template`` is not valid.
    """

    def __init__(self, tokenizer: Any, chat: ChatTemplate, tokens: TextTokens) -> None:
        self._tokenizer, self._decode, self._chat, self._tokens = tokenizer, decoder_of(tokenizer), chat, tokens
        self._tools_checked = False
        templates = tokenizer.chat_template  # a text, or several by name, such as the one for tools
        source = templates if isinstance(templates, str) else "".join(templates.values())
        self._has_response_template = getattr(tokenizer, "response_template", None) is not None
        self._thoughts = next((tags for tags in _THOUGHTS if tags[1] in source), None)
        self._forms = [form for form in FORMS if form.mark in source]
        self._ids_name = "<|tool_call_argument_begin|>" in source
        """Whether the template writes the id of a call instead of its name (Kimi K2)."""
        self._in_channels = all(tag in source for tag in ("<|channel|>", "<|message|>", "<|call|>"))
        self._marks = ["<|message|>"] if self._in_channels else []
        """Texts that, in addition to the marks of the forms, show that a call was attempted."""
        self._learned: CallForm | None = None
        if not (self._has_response_template or self._in_channels or self._reads_template()):
            self._learned = learned_form(self._render)
            self._forms = [*filter(None, [self._learned]), *self._forms]
        if self._has_response_template:
            opening = (tokenizer.response_template.get("fields") or {}).get("tool_calls", {}).get("open")
            self._marks += [opening] if isinstance(opening, str) else []
            try:
                tokenizer.get_response_parser(prefix="")
            except Exception as error:  # raised by the template, which is not part of this project
                raise DataError(
                    f"the tokenizer's response_template is not valid: {type(error).__name__}: {error}. Correct or "
                    "remove it in tokenizer_config.json."
                ) from error
        self._hidden = frozenset(i for token, i in special_tokens(tokenizer).items() if not self._is_tag(token))

    def parse(self, turn: Turn, prompt: Sequence[int], key: object, tools: Tools = ()) -> dict[str, Any]:
        """The assistant message of a sampled turn.

        Args:
            prompt: tokens before the answer, at least from the text that opens it. That text may contain ``<think>``.
            key: determines the ids of tool calls. Equal keys give equal ids.
        """
        if self._has_response_template:
            content, reasoning, calls = self._by_template(turn.ids, prompt, tools)
        elif self._in_channels:
            content, reasoning, calls = read_channels(self._text(turn.ids))
        else:
            # Of the prompt only its end matters: whether it opens the reasoning.
            content, reasoning, calls = self._by_tags(self._text(turn.ids), self._text(prompt[-16:]), tools)
        if len(calls) > 1 and not self._takes_several:
            calls = calls[:1]
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            call_ids = [call.id for call in calls]
            message["tool_calls"] = [
                _call(call.id if call_ids.count(call.id) == 1 and call.id else _id(key, n), call.name, call.arguments)
                for n, call in enumerate(calls)
            ]
        return message

    def has_unread_call(self, message: Mapping[str, Any]) -> bool:
        """Whether the content of a parsed answer begins a call, or has the header of a part (gpt-oss). If the answer
        has neither content nor calls, its reasoning is searched instead, because the end of the reasoning may be
        missing."""
        calls = message.get("tool_calls")
        text = message.get("content") or ("" if calls else message.get("reasoning_content")) or ""
        return any(form.is_tried(text, bool(calls)) for form in self._forms) or any(m in text for m in self._marks)

    def _prefix_and_answer(self, question: str, answer: Mapping[str, Any], tools: Tools) -> tuple[str, str]:
        """The text that the template writes before an answer, and the text of the answer. Raises DataError."""
        chat, messages = self._chat.with_tools(tools), [{"role": "user", "content": question}]
        openings = [chat.text(messages, is_opened) for is_opened in (True, False)]
        text = chat.text([*messages, {"role": "assistant", **answer}], answer=False)
        prefix = next((opening for opening in openings if text.startswith(opening)), "")
        return prefix, text[len(prefix) :]

    def _render(self, content: str, calls: Sequence[Call]) -> str:
        """The text that the template writes for an answer, up to its end token. Raises DataError."""
        answer: dict[str, Any] = {"content": content}
        if calls:
            answer["tool_calls"] = [_call(call_id, *call) for call_id, call in zip(CALL_IDS, calls, strict=False)]
        text = self._prefix_and_answer("x", answer, PROBE_TOOLS)[1].rstrip()
        for end in filter(None, (self._tokenizer.eos_token, self._chat.ends.token)):
            text = text.removesuffix(end).rstrip()
        return text

    def _reads_template(self) -> bool:
        """Whether one of the known forms can read a call that the template writes."""
        try:
            text = self._render("", [("zqname", {"zqkey": "zqtext"})])
        except DataError:
            return True  # it writes none, so none is learned
        return [call[:2] for call in read_calls(text, self._forms, {})[1]] == [("zqname", '{"zqkey": "zqtext"}')]

    @cached_property
    def _takes_several(self) -> bool:
        """Whether the template accepts several calls in an answer. Those of Llama 3.1 to 3.3 refuse them."""
        call = ("zqname", {"zqkey": "zqtext"})
        for calls in ([call], [call, call]):
            try:
                self._render("", calls)
            except DataError:
                return len(calls) == 1  # a template that takes no call at all is refused by check_tools()
        return True

    def check_tools(self) -> None:
        """Raises DataError if the chat template does not write the descriptions of tools, because the policy would not
        see them. Also raises DataError if a call that the template writes is not parsed back, because tools would never
        be called."""
        if self._tools_checked:
            return
        question, tools = "Will it rain in Paris?", [_PROBE_TOOL]
        messages = [{"role": "user", "content": question}]
        opened = self._chat.with_tools(tools).text(messages, answer=True)
        if opened == self._chat.text(messages, answer=True):
            raise DataError(
                "the chat template does not write the descriptions of tools, so the policy would never see them. Use a "
                "model whose chat template writes them, or set data.chat_template to a file with such a template."
            )
        call_id = "functions.forecast:0" if self._ids_name else _id("", 0)
        answer = {"content": "", "tool_calls": [_call(call_id, "forecast", _PROBE_ARGUMENTS)]}
        prefix, call_text = self._prefix_and_answer(question, answer, tools)
        before_name, name, _ = call_text.partition("forecast")
        for end in filter(None, self._chat.ends.tokens):
            if prefix and name and end in before_name:
                raise DataError(
                    f"the chat template writes the end token {end!r} before a call: {call_text[:200]!r}. A sample ends "
                    "with it, so tools would never be called. Set data.chat_template to a file with a template that "
                    "writes calls within the answer."
                )
        plain_prefix, plain = self._prefix_and_answer(question, {"content": "Yes."}, tools)
        for token in special_tokens(self._tokenizer) if plain_prefix == opened else ():
            if self._learned is not None and self._learned.visible(token) and token in plain:
                raise DataError(
                    f"the chat template writes {token!r} in calls and in the answer {plain[:200]!r}, so calls cannot "
                    "be distinguished from other answers. Add a response_template to tokenizer_config.json, or set "
                    "data.chat_template to a file with another template."
                )
        message = self.parse(Turn(self._tokens.ids(call_text), sampled=True), self._tokens.ids(prefix), "", tools)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if [(c["name"], decoded(c["arguments"])) for c in calls] != [("forecast", _PROBE_ARGUMENTS)]:
            raise DataError(
                f"the chat template writes the call forecast(city='Paris', days=3) as {call_text[-200:]!r}. "
                f"Parsing this as an answer gives {calls or 'no call'}, so tools would never be called. Calls are "
                "parsed with the tokenizer's response_template or, without one, in the formats of "
                "docs/how-to/tools.md, such as JSON with name and arguments in <tool_call> ... </tool_call>. Add a "
                "response_template to tokenizer_config.json, or set data.chat_template to a file with a template that "
                "writes calls in such a format."
            )
        self._tools_checked = True

    def _by_template(
        self, ids: Sequence[int], prompt: Sequence[int], tools: Tools
    ) -> tuple[str, str, list[AnswerCall]]:
        text, prefix = self._decode(ids), self._decode(prompt)
        try:
            parsed = self._tokenizer.parse_response(text, prefix=prefix, tools=[dict(t) for t in tools] or None)
        except Exception:  # the model's text is not in the format: it stays content
            return self._text(ids), "", []
        reasoning = parsed.get("reasoning_content") or parsed.get("thinking") or parsed.get("reasoning") or ""
        parsed_calls = parsed.get("tool_calls") or []
        calls = calls_in_objects([parsed_calls])
        if parsed_calls and not calls:  # JSON that is no call, which the response_template does not check
            return self._text(ids), "", []
        return parsed.get("content") or "", reasoning, calls

    def _by_tags(self, text: str, prefix: str, tools: Tools) -> tuple[str, str, list[AnswerCall]]:
        reasoning, content, calls = "", text, list[AnswerCall]()
        if self._thoughts:
            opening, closing = self._thoughts
            opened = prefix.rstrip().endswith(opening) or text.lstrip().startswith(opening)
            if opened or (closing in text and opening not in text.partition(closing)[0]):
                reasoning, end, content = text.partition(closing)
                if not end:  # a call also ends reasoning, as in vLLM and llama.cpp; all other text is reasoning
                    reasoning, calls = read_calls(reasoning, self._forms, argument_types(tools))
                reasoning, content = reasoning.strip().removeprefix(opening).strip("\n"), content.lstrip("\n")
        if not calls:
            content, calls = read_calls(content, self._forms, argument_types(tools))
        return content, reasoning, calls

    def _is_tag(self, token: str) -> bool:
        tags = [*(self._thoughts or ()), *(CHANNELS if self._in_channels else ())]
        return any(token in tag for tag in tags) or any(form.visible(token) for form in self._forms)

    def _text(self, ids: Sequence[int]) -> str:
        """Text without special tokens, except tags."""
        return self._decode([i for i in ids if i not in self._hidden])


def _call(call_id: str, name: str, arguments: object) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _id(key: object, number: int) -> str:
    """Nine letters and digits, the only form that every chat template accepts."""
    return hashlib.sha256(f"{key}/{number}".encode()).hexdigest()[:9]
