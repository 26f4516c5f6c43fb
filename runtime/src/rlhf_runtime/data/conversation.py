"""Find each answer in the render of a chat template.

The text that is tokenised is always ONE render of the whole conversation. A second render, in which every text is
replaced by a marker, shows which characters belong to which message: replacing the markers by the texts must give the
first render exactly. A template that rewrites or drops a message's text fails this check and is refused; the error
names the message. Tool calls have no markers. They follow the message's text, up to its end token.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import zip_longest
from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.data.row_fields import Message
from rlhf_runtime.data.template_render import TemplateRender
from rlhf_runtime.data.text_tokens import Span
from rlhf_runtime.data.tokenizer import special_tokens
from rlhf_runtime.data.written_parts import MARKER, Text, check_parts, form_of, mark, tail_length, with_markers

_USER = {"role": "user", "content": "x"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
}


@dataclass(frozen=True, slots=True)
class Render:
    """A rendered conversation and the characters of each assistant message: from the end of the generation prompt up to
    and including the end token."""

    text: str
    answers: tuple[Span, ...]
    marked_end: bool = True
    """Whether the end tokens are in the template's ``{% generation %}`` blocks, if it has these."""


class ChatTemplate:
    """A tokenizer's chat template, with the answers in its renders.

    Raises ConfigError: a keyword argument is not the template's.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any], day: datetime | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = TemplateRender(tokenizer, kwargs, day or datetime.now())
        self.text = self._template.text
        self.day = self._template.day if self._template.dated else None
        """The time that the template reads as now; None if it does not read the clock."""
        self._head: str | None = None
        self._checked = set[tuple[Any, ...]]()

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """A template that shows tools of rows, of which :meth:`with_tools` makes others. It is made anew, because a
        tokenizer may have another template for tools.

        Raises DataError: the template does not read tools, or shows those of its keyword arguments.
        """
        if "tools" in self._template.kwargs:
            raise DataError(
                "the row has tools in the column 'tools', and data.template_kwargs.tools has tools for all rows; "
                "remove the column or the option"
            )
        if "tools" not in self._template.variables:
            raise DataError(
                "the row has tools in the column 'tools', but the chat template does not read tools, so the policy "
                "would not know of them. Use a template that writes tools (data.chat_template), or take the column out"
            )
        chat = ChatTemplate(self._tokenizer, {**self._template.kwargs, "tools": [*tools]}, self._template.day)
        _ = chat.answer_end, chat._generation_head()  # they do not depend on the tools, so they are computed once
        return chat

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """A copy that shows other tools. The two share the results of checks of messages."""
        chat = copy.copy(self)
        chat._template = self._template.with_tools(tools)
        chat.text = chat._template.text
        return chat

    def check(self, messages: Sequence[Message], trained: Sequence[int] = (), source: str = "") -> None:
        """Raises DataError: the template leaves out a part of the messages. Messages of one form are checked once for
        each source, among like messages.

        Args:
            trained: the assistant messages that are trained on. Their parts must be in the text of the answers.
        """
        messages_of_forms = self._unchecked(messages, trained, source)
        if messages_of_forms:
            # A template that marks its answers says that its earlier ones are trained on without their reasoning.
            reasoning = trained[-1:] if self._template.has_generation else trained
            if not trained and messages[-1]["role"] == "assistant":  # the whole text is trained on
                reasoning = [len(messages) - 1]
            numbers = messages_of_forms.values()
            check_parts(lambda other: self._rendered_texts(other, trained), messages, trained, numbers, reasoning)
            if trained and not self._template.has_generation:  # a template that marks its answers decides itself
                self._require_context(messages, trained, {*numbers, trained[-1]})
            self._checked |= messages_of_forms.keys()

    def check_context(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], start: int = 0) -> None:
        """Raises DataError: the template leaves out a text that the policy did not write, in a message from number
        ``start`` on. How it shows the policy's earlier answers is its own affair."""
        if messages_of_forms := self._unchecked(messages, (), None, start):
            unchecked = [m for m, message in enumerate(messages) if m < start or message["role"] == "assistant"]

            def render(other: Sequence[Message]) -> list[str]:
                return [self.text(other, answer=True, tools=tools)] * len(messages)

            check_parts(render, messages, (), (), (), unchecked=unchecked)
            self._checked |= messages_of_forms.keys()

    def _unchecked(
        self, messages: Sequence[Message], trained: Sequence[int], source: str | None, start: int = 0
    ) -> dict[tuple[Any, ...], int]:
        """{form: the first message of it, from number ``start`` on}, of the forms that were not checked yet.

        ``source``: of rows; None: of requests."""
        last = {message["role"]: m for m, message in enumerate(messages)}
        forms = dict[tuple[Any, ...], int]()
        for m, message in enumerate(messages[start:], start):
            previous_role = messages[m - 1]["role"] if m else ""
            # some templates move a system message
            has_later = tuple(m < last.get(role, -1) for role in ("user", "system"))
            forms.setdefault((source, m in trained, previous_role, has_later, form_of(message)), m)
        return {form: m for form, m in forms.items() if form not in self._checked}

    def render(self, messages: Sequence[Message], trained: Sequence[int], as_asked: bool = True) -> Render:
        """One render with the spans of the assistant messages ``trained`` (indices into ``messages``).

        ``as_asked``: refuse an answer that does not follow the same text that the policy is given when it answers.
        """
        if self._template.has_generation:
            return self._marked_by_template(messages, trained)
        text = self.text(messages, answer=False)
        marked, texts, tails = with_markers(messages)
        pieces = MARKER.split(self.text(marked, answer=False))  # text, number, text, number, ..., text
        order = [int(n) for n in pieces[1::2]]
        self._check(messages, trained, texts, order)
        places = _places(text, pieces[0::2], [texts[n] for n in order], trained)
        last = {text.message: number for number, text in enumerate(texts)}
        starts, ends = dict[int, int](), dict[int, int]()
        for m in trained:
            conversation = messages if as_asked else None
            indices = [i for i, number in enumerate(order) if texts[number].message == m]
            if indices:
                starts[m] = self._start(text, pieces[2 * indices[0]], places[indices[0]][0], m, conversation)
                tail = tails[m] if order[indices[-1]] == last[m] else ""
                ends[m] = places[indices[-1]][1] + tail_length(pieces[2 * indices[-1] + 2], tail, m)
            else:  # tool calls only
                previous = max((i for i, number in enumerate(order) if texts[number].message == m - 1), default=-1)
                head = pieces[2 * previous + 2].find(self._generation_head()) if previous >= 0 else -1
                if head >= 0 and self._generation_head():
                    starts[m] = places[previous][1] + head + len(self._generation_head())
                else:
                    starts[m] = self._prompt_end(text, messages, m)
                ends[m] = starts[m]
            if messages[m].get("tool_calls"):
                following = next((first for first, _ in places if first > ends[m]), len(text))
                ends[m] = self._end_of_calls(text, messages, m, ends[m], following)
        plain = [m for m in trained if not messages[m].get("tool_calls")]
        if plain:
            is_last = plain[-1] == len(messages) - 1
            end = self._end(text[ends[plain[-1]] :]) if is_last else self._plain_end
            ends |= {m: _including(end, text, ends[m]) for m in plain}
        return Render(text, tuple((starts[m], ends[m]) for m in trained))

    def end_token(self, following: str) -> str:
        """The special token that follows an answer's text, ignoring white space between them; two, if the template ends
        every answer with two."""
        following = following.lstrip()
        if self._two_ends and following.startswith(self._two_ends):
            return self._two_ends
        return self._token_at(following)

    def is_ended(self, text: str) -> bool:
        """Whether a text ends with an end token."""
        ends = self._all_tokens if self._short is None else [*self._special, self.end]
        return text.endswith(tuple(ends))

    @property
    def end(self) -> str:
        """The end token of an answer: the template's, or else the tokenizer's."""
        token: str = self.answer_end or self._tokenizer.eos_token
        return token

    @property
    def ends(self) -> tuple[str, str]:
        """The end tokens with which samples end: :attr:`end` and the tokenizer's."""
        return self.end, self._tokenizer.eos_token

    @cached_property
    def answer_end(self) -> str:
        """The end token that the template writes after an answer that is text; empty if it writes none."""
        if self._short is None:
            return ""
        answer = self._short.text[: self._short.answers[0][1]]
        return max((t for t in self._all_tokens if answer.endswith(t)), key=len, default="")

    @property
    def end_note(self) -> str:
        """What the user should know about an end token that the template does not write or mark; empty if it does."""
        if self._short is None:
            return ""
        missing = [] if self.answer_end else ["an answer"]
        with suppress(DataError):  # it has no place for calls
            call_render = self.render([_USER, _CALL], [1], as_asked=False)
            if self.answer_end and not self.is_ended(call_render.text[: call_render.answers[0][1]]):
                missing.append("a tool call")
        if missing:
            return (
                f"the chat template writes no end token after {missing[0]}, without which a policy would not learn to "
                f"stop. {self.end!r} is added to the last answer of each row and trained on. To end every answer, name "
                "a template that does as data.chat_template"
            )
        if self._template.has_generation and not self._short.marked_end:
            return (
                f"the {{% generation %}} blocks of the chat template leave out the end token {self.end!r}, without "
                "which a policy would not learn to stop. It is trained on too"
            )
        return ""

    # ------------------------------------------------------------------------------------- inside

    def _rendered_texts(self, messages: Sequence[Message], trained: Sequence[int]) -> list[str]:
        """For each message, the rendered text that must contain its parts."""
        if not trained:
            return [self.text(messages, answer=messages[-1]["role"] != "assistant")] * len(messages)
        render = self.render(messages, trained, as_asked=False)
        answers = {m: render.text[start:end] for m, (start, end) in zip(trained, render.answers, strict=True)}
        return [answers.get(m, render.text) for m in range(len(messages))]

    def _marked_by_template(self, messages: Sequence[Message], trained: Sequence[int]) -> Render:
        text, spans = self._template.marked_by_template(messages)
        assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if len(spans) > len(assistants):
            spans = self._joined(text, spans)
        if len(spans) != len(assistants):
            raise DataError(
                f"the chat template marks {len(spans)} passages with {{% generation %}} for {len(assistants)} "
                "assistant messages; it must mark one for each"
            )
        answers = dict[int, Span]()
        for m, (start, end) in zip(assistants, spans, strict=True):
            stripped = text[:end].rstrip()  # no sample has the white space after its end token
            answers[m] = (self._opened(text, start), len(stripped) if stripped.endswith(self._special) else end)
        last = answers[trained[-1]][1]
        marked, rest = text[:last].endswith(self._special), text[last:].strip()
        if not marked:
            is_last = trained[-1] == len(messages) - 1
            token = self.end_token(rest) if is_last else self.answer_end
            if is_last and rest and not token:
                raise DataError(
                    f"the {{% generation %}} block of message {trained[-1]} (assistant) ends before {rest[:60]!r}, "
                    "which the policy has to write too. Move {% endgeneration %} behind the answer's end token."
                )
            answers = {m: (start, _including(token, text, end)) for m, (start, end) in answers.items()}
        return Render(text, tuple(answers[m] for m in trained), marked)

    def _joined(self, text: str, spans: Sequence[Span]) -> list[Span]:
        """The marked passages, of which one that directly follows another belongs to the same answer, and one without
        text to none. A tokenizer's end token behind the end token of an answer (TRL's templates for Phi-3) is left out,
        because samples end before it."""
        joined = list[Span]()
        for start, end in spans:
            if not joined or start != joined[-1][1]:
                joined += [(start, end)] if start != end else []
            elif text[start:end].strip() != self._tokenizer.eos_token or not self._ends(text[:start]):
                joined[-1] = joined[-1][0], end
        return joined

    def _ends(self, text: str) -> bool:
        """Whether a text ends with a special token, ignoring white space after it."""
        return text.rstrip().endswith(self._special)

    def _opened(self, text: str, start: int) -> int:
        """Start of an answer whose block begins at ``start``. Blocks of some published templates hold the generation
        prompt, or its end, which no sample has. An earlier answer may lack its ``<think>``."""
        head = self._generation_head()
        for opening in filter(None, (head, head.partition("<think>")[0])):
            index = text.find(opening, max(0, start - len(opening)), start + len(opening))
            if index >= 0:
                return index + len(opening)
        return start

    @cached_property
    def _short(self) -> Render | None:
        """The render of a short conversation; None if the template needs other messages."""
        try:
            return self.render([_USER, {"role": "assistant", "content": mark(0)}], [1], as_asked=False)
        except DataError:
            return None

    @cached_property
    def _two_ends(self) -> str:
        """A token and the tokenizer's end token, with which the template ends every answer, also earlier ones (Cohere:
        ``<|END_RESPONSE|><|END_OF_TURN_TOKEN|>``); else empty."""
        try:
            text = self.text([_USER, {"role": "assistant", "content": mark(0)}, _USER], answer=False)
        except DataError:
            return ""
        following = text.rpartition(mark(0))[2]
        first, end = self._token_at(following), self._tokenizer.eos_token
        return first + end if first != end and first and following.startswith(first + end) else ""

    def _token_at(self, text: str) -> str:
        """The special or added token with which a text begins; empty if it begins otherwise."""
        return max((t for t in self._all_tokens if text.startswith(t)), key=len, default="")

    @property
    def _plain_end(self) -> str:
        """What ends an answer without tool calls: :attr:`answer_end`, with what the template writes before it."""
        return self._end(self._short.text.rpartition(mark(0))[2]) if self._short is not None else ""

    def _end(self, following: str) -> str:
        """The end token of an answer whose text stands before ``following``, the rest of a render, with what the
        template writes before it; empty if there is none."""
        if token := self.end_token(following):
            return token
        rest = following.strip()
        token = max((t for t in self._special if t in rest), key=rest.find, default="")
        return rest if token and rest.endswith(token) else ""

    @cached_property
    def _special(self) -> tuple[str, ...]:
        """The special tokens of the tokenizer."""
        return tuple(special_tokens(self._tokenizer))

    @cached_property
    def _all_tokens(self) -> frozenset[str]:
        """All special and added tokens of the tokenizer."""
        return frozenset([*self._special, *self._tokenizer.get_added_vocab()])

    def _check(
        self, messages: Sequence[Message], trained: Sequence[int], texts: Sequence[Text], order: Sequence[int]
    ) -> None:
        for m in trained:
            numbers = [n for n, text in enumerate(texts) if text.message == m]
            if not numbers and not messages[m].get("tool_calls"):
                raise DataError(
                    f"message {m} (assistant) has no text, so where it stands in the chat template's render cannot be "
                    "told. Mark answers in the template with {% generation %} ... {% endgeneration %}."
                )
            lost = [n for n in numbers if order.count(n) != 1]
            if lost and m == len(messages) - 1:
                fields = ", ".join(key for key in messages[m] if key != "role")
                raise DataError(
                    f"the chat template leaves out part of message {m} (assistant): {texts[lost[0]].text[:60]!r}. Use "
                    f"a template that writes all of {fields} (data.chat_template), or rename or remove in the row what "
                    "it does not read."
                )
            if lost:
                raise DataError(
                    f"the chat template leaves out part of message {m} (assistant): {texts[lost[0]].text[:60]!r}. It "
                    "rewrites history, e.g. strips the reasoning of earlier answers, so training on all answers would "
                    'miss what they say. Train on the last one (data.loss_on = "completion"), give one row per answer, '
                    "or use a template that keeps them."
                )

    def _end_of_calls(self, text: str, messages: Sequence[Message], message: int, position: int, following: int) -> int:
        """End of an answer with tool calls, after its end token.

        Args:
            position: end of the answer's text.
            following: start of the text of another message.
        """
        end = self.answer_end
        piece = text[position:following]
        index = min((i for t in self._special if (i := piece.find(t)) >= 0), default=-1)
        if end and index >= 0 and piece.startswith(end, index):  # no render of the messages up to this one is needed
            return position + index + len(end)
        prefix = text if message == len(messages) - 1 else self.text(messages[: message + 1], answer=False)
        prefix = prefix.rstrip()
        is_prefix = text.startswith(prefix) and len(prefix) > position
        index = text.find(end, position, len(prefix) if is_prefix else following) if end else -1
        if index >= 0:
            return index + len(end)
        if is_prefix:  # another end token, or none
            return len(prefix)
        raise DataError(
            f"the chat template writes message {message} (assistant) otherwise once other messages follow, so where "
            'its tool calls end cannot be told. Train on the last answer (data.loss_on = "completion"), or mark '
            "answers in the template with {% generation %} ... {% endgeneration %}."
        )

    def _require_context(self, messages: Sequence[Message], trained: Sequence[int], answers: Collection[int]) -> None:
        """Raises DataError: one of ``some`` answers does not follow the text that the policy is given for it."""
        render = self.render(messages, trained)
        for m, (start, _) in zip(trained, render.answers, strict=True):
            context = render.text[:start]
            if m and m in answers and (prompt := self.text(messages[:m], answer=True)) != context:
                raise _never_seen(messages, m, prompt, context)

    def _generation_head(self) -> str:
        """The text that ``add_generation_prompt`` adds; empty if it adds none."""
        if self._head is None:
            self._head = ""
            with suppress(DataError):  # it needs other messages
                plain, ready = self.text([_USER], answer=False), self.text([_USER], answer=True)
                self._head = ready[len(plain) :] if ready.startswith(plain) else ""
        return self._head

    def _start(self, text: str, piece: str, position: int, message: int, conversation: Sequence[Message] | None) -> int:
        """Start of an answer whose text is preceded by ``piece``, which ends at ``position`` of the render. The answer
        starts after the generation prompt, so text that the template adds between it and the answer's text (an empty
        think block) is part of the answer. Without a generation prompt it starts after the text that the policy is
        given, so a space or a tag before the text is part of the answer.

        Args:
            conversation: the whole conversation, if the answer is trained on. The answer must then follow the same text
                that the policy is given when it answers.

        Raises DataError: it follows another text (Qwen3 without thinking: only the last answer has the empty block), so
            the policy would never answer in this context.
        """
        head = self._generation_head()
        index = piece.rfind(head) if head else -1
        if index >= 0 or conversation is None:
            return position if index < 0 else position - len(piece) + index + len(head)
        return self._prompt_end(text, conversation, message, piece, position)

    def _prompt_end(
        self, text: str, messages: Sequence[Message], message: int, piece: str = "", position: int = -1
    ) -> int:
        """End of the text that the policy is given when it answers with ``message``, which must begin the render.

        Args:
            piece: the text before the answer's, if it has text, in which the prompt must end.
            position: end of the piece.
        """
        prompt = self.text(messages[:message], answer=True) if message else ""
        if text.startswith(prompt) and (not piece or position - len(piece) <= len(prompt) <= position):
            return len(prompt)
        raise _never_seen(messages, message, prompt, text[:position] if piece else text)


def _never_seen(messages: Sequence[Message], message: int, prompt: str, context: str) -> DataError:
    """
    Args:
        context: the text before the message, which differs from the ``prompt``.
    """
    difference = next((i for i, (a, b) in enumerate(zip_longest(prompt, context)) if a != b), len(prompt))
    window = slice(max(0, difference - 30), difference + 30)
    last = "" if message == len(messages) - 1 else 'Train on the last answer (data.loss_on = "completion"). '
    return DataError(
        f"the policy is given {prompt[window]!r} before it answers, but the chat template writes message {message} "
        f"(assistant) after {context[window]!r}: it would be trained in a context that it never sees. {last}Set other "
        "data.template_kwargs, or mark answers in the template with {% generation %} ... {% endgeneration %}."
    )


def _places(text: str, pieces: Sequence[str], texts: Sequence[Text], trained: Sequence[int]) -> list[Span]:
    """The characters of each text in the render, where they stand between the template's own ``pieces``.

    Templates may write the results of tools as JSON; texts that are trained on must be written as they are.
    """
    places, position = list[Span](), 0
    for number, value in enumerate(texts):
        if not text.startswith(pieces[number], position):
            break
        position += len(pieces[number])
        forms = [value.text]
        if value.message not in trained:
            forms.append(json.dumps(value.text, ensure_ascii=False)[1:-1])
        form = next((f for f in forms if text.startswith(f + pieces[number + 1], position)), value.text)
        places.append((position, position + len(form)))
        position += len(form)
    if len(places) == len(texts) and text[position:] == pieces[-1]:
        return places
    raise DataError(
        "the chat template changes the text of messages (beyond trimming), so the tokens of the answer cannot "
        "be found. Mark answers in the template with {% generation %} ... {% endgeneration %}, "
        'or use template = "plain".'
    )


def _including(end: str, text: str, position: int) -> int:
    """The position after the end token if it follows (ignoring white space), else ``position``. Some templates end only
    the last answer with it, others also the user's messages."""
    following = text[position:].lstrip()
    return len(text) - len(following) + len(end) if end and following.startswith(end) else position
