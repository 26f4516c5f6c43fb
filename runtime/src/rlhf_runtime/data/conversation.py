"""Find each answer in the render of a chat template.

The tokenised text is always ONE render of the whole conversation. A second render, with a marker for every text, shows
the passages: the characters of each message. Replacing the markers by the texts must give the first render exactly. A
template that rewrites or drops a message's text fails this check and is refused. The error names the message.

An answer starts after the head (the text that ``add_generation_prompt`` adds), which is in the gap before its first
passage. It ends after the end token that follows its last passage. Tool calls are not passages. They are between the
last passage and the end token.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

from rlhf.errors import DataError

from rlhf_runtime.data.answer_ends import AnswerEnds, including
from rlhf_runtime.data.row_fields import Message
from rlhf_runtime.data.template_render import TemplateRender
from rlhf_runtime.data.text_tokens import Span
from rlhf_runtime.data.written_parts import MARKER, Text, check_parts, form_of, tail_length, with_markers

_USER = {"role": "user", "content": "x"}
_ANSWER = {"role": "assistant", "content": "y"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
}


@dataclass(frozen=True, slots=True)
class Render:
    """A rendered conversation and the position of answers in it."""

    text: str
    answers: Mapping[int, Span]
    """{assistant message: its characters, from the end of the generation prompt up to and including the end token}, in
    the order of the messages."""
    marked_end: bool = True
    """Whether the end tokens are in the template's ``{% generation %}`` blocks, if it has these."""


class ChatTemplate:
    """A tokenizer's chat template, which also finds the answers in its renders.

    Raises ConfigError: the template does not read a keyword argument.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any], day: datetime | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = TemplateRender(tokenizer, kwargs, day or datetime.now())
        self.text = self._template.text
        self.day = self._template.day if self._template.dated else None
        """The time that the template reads as now; None if it does not read the clock."""
        self.ends = AnswerEnds(tokenizer, self.text)
        self._checked = set[tuple[Any, ...]]()

    def for_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """A template that shows tools of rows. :meth:`with_tools` of it makes templates for other tools. It is a new
        object, because a tokenizer may have another template for tools.

        Raises DataError: the template does not read tools, or shows the tools of its keyword arguments.
        """
        if "tools" in self._template.kwargs:
            raise DataError(
                "the row has tools in the column 'tools', and data.template_kwargs.tools has tools for all rows; "
                "remove the column or the option"
            )
        if "tools" not in self._template.variables:
            raise DataError(
                "the row has tools in the column 'tools', but the chat template does not read tools, so the policy "
                "would not see them. Use a template that writes tools (data.chat_template), or remove the column"
            )
        chat = ChatTemplate(self._tokenizer, {**self._template.kwargs, "tools": [*tools]}, self._template.day)
        _ = chat._head  # it does not depend on the tools, so it is computed once
        return chat

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """A copy that shows other tools instead of the tools in the keyword arguments. Without tools, the template
        itself. Both share the results of checks of messages."""
        if not tools:
            return self
        chat = copy.copy(self)
        chat._template = self._template.with_tools(tools)
        chat.text = chat._template.text
        return chat

    # ------------------------------------------------------------------------------------- checks

    def check(self, messages: Sequence[Message], source: str, render: Render | None = None) -> None:
        """Raises DataError: the template leaves out a part of the messages. Messages of the same form are checked once
        for each source, and contexts of trained answers once for each set of forms.

        Args:
            render: render of the messages, with the answers that are trained on. The parts of these answers must be in
                the text of the answers.
        """
        trained = [] if render is None else [*render.answers]
        forms = _forms(messages, trained, source)
        if messages_of_forms := self._unchecked(forms):
            self._check_parts(messages, messages_of_forms, trained)
            self._checked |= messages_of_forms.keys()
        if render is not None and not self._template.has_generation:  # a template that marks its answers decides itself
            self._check_contexts(messages, forms, render)

    def _check_parts(
        self, messages: Sequence[Message], messages_of_forms: Mapping[tuple[Any, ...], int], trained: Sequence[int]
    ) -> None:
        """Raises DataError: the template leaves out a part of the messages."""
        # A template that marks its answers says that its earlier ones are trained on without their reasoning.
        reasoning = trained[-1:] if self._template.has_generation else trained
        if not trained and messages[-1]["role"] == "assistant":  # the whole text is trained on
            reasoning = [len(messages) - 1]

        def write(other: Sequence[Message]) -> list[str]:
            if not trained:
                return [self.text(other, answer=other[-1]["role"] != "assistant")] * len(other)
            variant = self.render(other, trained, as_asked=False)
            answers = {m: variant.text[start:end] for m, (start, end) in variant.answers.items()}
            return [answers.get(m, variant.text) for m in range(len(other))]

        check_parts(write, messages, trained, messages_of_forms.values(), reasoning)

    def _check_contexts(self, messages: Sequence[Message], forms: Sequence[tuple[Any, ...]], render: Render) -> None:
        """Raises DataError: the policy would answer in another context. It depends on other messages, too: Mistral's
        template moves a system message to the last question, so an earlier answer stands after it only when it is
        sampled."""
        all_forms = frozenset(forms)
        for m, (start, _) in render.answers.items():
            key = forms[m], frozenset(forms[:m]), all_forms
            if m and key not in self._checked:
                prompt, context = self.text(messages[:m], answer=True), render.text[:start]
                if prompt != context:
                    raise _never_seen(messages, m, prompt, context)
                self._checked.add(key)

    def check_context(self, messages: Sequence[Message], start: int = 0) -> None:
        """Raises DataError: the template leaves out a text that the policy did not write, in a message from number
        ``start`` on. The template may show the policy's earlier answers in any way."""
        if messages_of_forms := self._unchecked(_forms(messages, (), None), start):
            unchecked = [m for m, message in enumerate(messages) if m < start or message["role"] == "assistant"]
            check_parts(lambda other: [self.text(other, answer=True)] * len(other), messages, (), (), (), unchecked)
            self._checked |= messages_of_forms.keys()

    def _unchecked(self, forms: Sequence[tuple[Any, ...]], start: int = 0) -> dict[tuple[Any, ...], int]:
        """{form: number of the first message with this form, from ``start`` on}, for forms that were not checked
        yet."""
        numbers = dict[tuple[Any, ...], int]()
        for m, form in enumerate(forms[start:], start):
            if form not in self._checked:
                numbers.setdefault(form, m)
        return numbers

    # ------------------------------------------------------------------------------------- answers

    def render(self, messages: Sequence[Message], trained: Sequence[int], as_asked: bool = True) -> Render:
        """One render with the answers ``trained`` (assistant messages, in order).

        ``as_asked``: refuse an answer if the text before it differs from the text that the policy sees when it answers.
        """
        if self._template.has_generation:
            return self._marked_by_template(messages, trained)
        text = self.text(messages, answer=False)
        marked, texts, tails = with_markers(messages)
        pieces = MARKER.split(self.text(marked, answer=False))  # text, number, text, number, ..., text
        order = [texts[int(n)] for n in pieces[1::2]]
        _require_texts(messages, trained, texts, order)
        passages = _passages(text, pieces[0::2], order, trained)
        last_text = {text.message: text for text in texts}
        starts, ends = dict[int, int](), dict[int, int]()
        for m in trained:
            starts[m] = ends[m] = self._start(text, passages, messages, m, as_asked)
            if last := next((p for p in reversed(passages) if p.text.message == m), None):
                tail = tails[m] if last.text is last_text[m] else ""
                ends[m] = last.end + tail_length(text[last.end : last.gap_end], tail, m)
            if messages[m].get("tool_calls"):
                following = next((p.start for p in passages if p.start > ends[m]), len(text))
                ends[m] = self._end_of_calls(text, messages, m, ends[m], following)
        plain = [m for m in trained if not messages[m].get("tool_calls")]
        if plain:
            is_last = plain[-1] == len(messages) - 1
            # After an earlier answer the rest of the render also has the next messages. Its end is then the one that
            # the template writes in a short conversation.
            end = self.ends.end_in(text[ends[plain[-1]] :]) if is_last else self.ends.of_text or ""
            ends |= {m: including(end, text, ends[m]) for m in plain}
        return Render(text, {m: (starts[m], ends[m]) for m in trained})

    def _start(
        self, text: str, passages: Sequence[_Passage], messages: Sequence[Message], m: int, as_asked: bool
    ) -> int:
        """Start of the answer ``m``. It starts after the head, so text that the template adds between the head and the
        first passage (an empty think block) is part of the answer. Without a head it starts after the text that the
        policy sees, so a space or a tag before the first passage is part of the answer.

        Raises DataError: the text before the answer differs from the text that the policy sees (Qwen3 without thinking:
        only the last answer has the empty block), so the policy would never answer in this context.
        """
        head, index = self._head, -1
        first = next((p for p in passages if p.text.message == m), None)
        previous = next((p for p in reversed(passages) if p.text.message == m - 1), None)
        if first is not None:
            index = text.rfind(head, first.gap_start, first.start)
        elif previous is not None:  # the answer is tool calls only
            index = text.find(head, previous.end, previous.gap_end)
        if head and index >= 0:
            return index + len(head)
        if first is not None and not as_asked:
            return first.start
        prompt = self.text(messages[:m], answer=True) if m else ""
        if text.startswith(prompt) and (first is None or first.gap_start <= len(prompt) <= first.start):
            return len(prompt)
        raise _never_seen(messages, m, prompt, text if first is None else text[: first.start])

    def _end_of_calls(self, text: str, messages: Sequence[Message], m: int, position: int, following: int) -> int:
        """End of the answer ``m`` with tool calls, after its end token.

        Args:
            position: end of the answer's last passage.
            following: start of the next passage.
        """
        end = self.ends.of_template
        piece = text[position:following]
        index = min((i for t in self.ends.special if (i := piece.find(t)) >= 0), default=-1)
        if end and index >= 0 and piece.startswith(end, index):  # no render of the messages up to this one is needed
            return position + index + len(end)
        prefix = text if m == len(messages) - 1 else self.text(messages[: m + 1], answer=False)
        prefix = prefix.rstrip()
        is_prefix = text.startswith(prefix) and len(prefix) > position
        index = text.find(end, position, len(prefix) if is_prefix else following) if end else -1
        if index >= 0:
            return index + len(end)
        if is_prefix:  # another end token, or none
            return len(prefix)
        raise DataError(
            f"the chat template writes message {m} (assistant) differently when other messages follow, so the end of "
            'its tool calls cannot be determined. Train on the last answer (data.loss_on = "completion"), or mark '
            "answers in the template with {% generation %} ... {% endgeneration %}."
        )

    @cached_property
    def _head(self) -> str:
        """The text that ``add_generation_prompt`` adds; empty if it adds none."""
        try:
            plain, ready = self.text([_USER], answer=False), self.text([_USER], answer=True)
        except DataError:  # it needs other messages
            return ""
        return ready[len(plain) :] if ready.startswith(plain) else ""

    # ---------------------------------------------------------------- answers that the template marks

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
        answers = {m: span for m, span in zip(assistants, spans, strict=True) if m in trained}
        for m, (start, end) in answers.items():
            stripped = text[:end].rstrip()  # no sample has the white space after its end token
            answers[m] = (self._opened(text, start), len(stripped) if stripped.endswith(self.ends.special) else end)
        last = answers[trained[-1]][1]
        marked, rest = text[:last].endswith(self.ends.special), text[last:].strip()
        if not marked:
            is_last = trained[-1] == len(messages) - 1
            token = self.ends.token_in(rest) if is_last else self.ends.of_template
            if is_last and rest and not token:
                raise DataError(
                    f"the {{% generation %}} block of message {trained[-1]} (assistant) ends before {rest[:60]!r}, "
                    "which the policy must also write. Move {% endgeneration %} after the answer's end token."
                )
            answers = {m: (start, including(token, text, end)) for m, (start, end) in answers.items()}
        return Render(text, answers, marked)

    def _joined(self, text: str, spans: Sequence[Span]) -> list[Span]:
        """The marked passages by answer. A passage that directly follows another belongs to the same answer. A passage
        without text is left out. A tokenizer's end token after the end token of an answer (TRL's templates for Phi-3)
        is left out too, because samples end before it."""
        joined = list[Span]()
        for start, end in spans:
            if not joined or start != joined[-1][1]:
                joined += [(start, end)] if start != end else []
                continue
            is_ended = text[:start].rstrip().endswith(self.ends.special)
            if not is_ended or text[start:end].strip() != self._tokenizer.eos_token:
                joined[-1] = joined[-1][0], end
        return joined

    def _opened(self, text: str, start: int) -> int:
        """Start of an answer whose block begins at ``start``. In some published templates, blocks contain the head or
        its end, which no sample has. An earlier answer may lack its ``<think>``."""
        for opening in filter(None, (self._head, self._head.partition("<think>")[0])):
            index = text.find(opening, max(0, start - len(opening)), start + len(opening))
            if index >= 0:
                return index + len(opening)
        return start

    @property
    def end_note(self) -> str:
        """A note about an end token that the template does not write or mark; empty if it does."""
        if self.ends.of_text is None:
            return ""
        missing = [] if self.ends.of_template else ["an answer"]
        with suppress(DataError):  # the template does not write calls
            call = self.render([_USER, _CALL], [1], as_asked=False)
            if not missing and not self.ends.is_ended(call.text[: call.answers[1][1]]):
                missing.append("a tool call")
        if missing:
            return (
                f"the chat template writes no end token after {missing[0]}, and without one a policy would not learn "
                f"to stop. {self.ends.token!r} is added to the last answer of each row and trained on. To end every "
                "answer with an end token, set data.chat_template to a template that writes one"
            )
        if not self.render([_USER, _ANSWER], [1], as_asked=False).marked_end:
            return (
                f"the {{% generation %}} blocks of the chat template leave out the end token {self.ends.token!r}. "
                "It is trained on anyway, because a policy would not learn to stop without it"
            )
        return ""


def _forms(messages: Sequence[Message], trained: Sequence[int], source: str | None) -> list[tuple[Any, ...]]:
    """For each message the properties on which a template may branch.

    ``source``: name of the source of rows; None for requests."""
    last = {message["role"]: m for m, message in enumerate(messages)}
    forms = list[tuple[Any, ...]]()
    for m, message in enumerate(messages):
        previous_role = messages[m - 1]["role"] if m else ""
        # some templates move a system message
        has_later = tuple(m < last.get(role, -1) for role in ("user", "system"))
        forms.append((source, m in trained, previous_role, has_later, form_of(message)))
    return forms


# ------------------------------------------------------------------------------- passages of a render


class _Passage(NamedTuple):
    """The place of a text in a render, between two gaps of the template's own text."""

    text: Text
    gap_start: int
    """Start of the gap before it."""
    start: int
    end: int
    gap_end: int
    """End of the gap after it."""


def _passages(text: str, gaps: Sequence[str], texts: Sequence[Text], trained: Sequence[int]) -> list[_Passage]:
    """The passage of each text in the render. Passages are between the ``gaps``.

    Templates may write the results of tools as JSON. Texts that are trained on must be written unchanged.
    """
    passages, position = list[_Passage](), 0
    for front, value, rear in zip(gaps, texts, gaps[1:], strict=False):
        if not text.startswith(front, position):
            break
        start = position + len(front)
        forms = [value.text]
        if value.message not in trained:
            forms.append(json.dumps(value.text, ensure_ascii=False)[1:-1])
        end = start + len(next((f for f in forms if text.startswith(f + rear, start)), value.text))
        passages.append(_Passage(value, position, start, end, end + len(rear)))
        position = end
    if len(passages) == len(texts) and text[position:] == gaps[-1]:
        return passages
    raise DataError(
        "the chat template changes the text of messages (beyond trimming), so the tokens of the answer cannot "
        "be found. Mark answers in the template with {% generation %} ... {% endgeneration %}, "
        'or use template = "plain".'
    )


def _require_texts(
    messages: Sequence[Message], trained: Sequence[int], texts: Sequence[Text], order: Sequence[Text]
) -> None:
    """Raises DataError: a text of a trained message does not occur exactly once, or such a message has neither text nor
    calls.

    Args:
        order: the texts in the order in which the template writes them.
    """
    for m in trained:
        texts_of_answer = [text for text in texts if text.message == m]
        if not texts_of_answer and not messages[m].get("tool_calls"):
            raise DataError(
                f"message {m} (assistant) has no text, so its position in the output of the chat template cannot be "
                "determined. Mark answers in the template with {% generation %} ... {% endgeneration %}."
            )
        lost = [text for text in texts_of_answer if sum(text is other for other in order) != 1]
        if not lost:
            continue
        advice = (
            "It rewrites history, e.g. strips the reasoning of earlier answers, so training on all answers would miss "
            'this text. Train on the last answer (data.loss_on = "completion"), write one row per answer, or use a '
            "template that keeps earlier answers unchanged."
        )
        if m == len(messages) - 1:
            fields = ", ".join(key for key in messages[m] if key != "role")
            advice = (
                f"Use a template that writes all of {fields} (data.chat_template), or rename or remove the fields of "
                "the row that it does not read."
            )
        raise DataError(
            f"the chat template leaves out part of message {m} (assistant): {lost[0].text[:60]!r}. {advice}"
        )


def _never_seen(messages: Sequence[Message], message: int, prompt: str, context: str) -> DataError:
    """
    Args:
        context: the text before the message, which differs from the ``prompt``.
    """
    difference = next((i for i, (a, b) in enumerate(zip_longest(prompt, context)) if a != b), len(prompt))
    window = slice(max(0, difference - 30), difference + 30)
    last = "" if message == len(messages) - 1 else 'Train on the last answer (data.loss_on = "completion"). '
    return DataError(
        f"the policy answers after {prompt[window]!r}, but the chat template writes message {message} (assistant) "
        f"after {context[window]!r}, so the policy would be trained in a context that it never sees. {last}Change "
        "data.template_kwargs, or mark answers in the template with {% generation %} ... {% endgeneration %}."
    )
