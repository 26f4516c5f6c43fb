"""Find each answer in the render of a chat template.

The text that is tokenised is always ONE render of the whole conversation. A second render, in which every text is
replaced by a marker, shows which characters belong to which message: replacing the markers by the texts must give the
first render exactly. A template that rewrites or drops a message's text fails this check and is refused; the error
names the message. Tool calls have no markers. They follow the message's text, up to its end token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlhf.errors import ConfigError, DataError

from rlhf_runtime.data.row_fields import Message
from rlhf_runtime.data.template_markers import MARKER, Text, tail_length, with_markers
from rlhf_runtime.data.token_spans import Span

_NOT_OF_TEMPLATES = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
        "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
        "truncation",
    }
)  # fmt: skip
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Render:
    """A rendered conversation and the characters of each assistant message: from the end of the generation prompt up to
    and including the end token."""

    text: str
    answers: tuple[Span, ...]


class ChatTemplate:
    """A tokenizer's chat template with fixed keyword arguments.

    Raises ConfigError: one of them is not the template's.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
        if taken := sorted(_NOT_OF_TEMPLATES & set(kwargs)):
            raise ConfigError(
                f"data.template_kwargs: {', '.join(taken)} controls how the template is applied, which is fixed here; "
                "allowed are variables that the template itself reads (enable_thinking, tools, ...)."
            )
        self._tokenizer, self._kwargs = tokenizer, dict(kwargs)
        self._source: str = tokenizer.get_chat_template(tools=kwargs.get("tools"))
        self._head: str | None = None
        self._parts_only = False
        """Whether the template reads content as a list of parts only, as those of some image-text models do."""
        self._require_content()

    def text(self, messages: Sequence[Message], answer: bool, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """One render. Raises DataError with the template's message.

        Args:
            answer: with the generation prompt.
            tools: descriptions of functions, in place of those in the keyword arguments.
        """
        kwargs = {**self._kwargs, "tools": [dict(t) for t in tools]} if tools else self._kwargs
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                self._as_read(messages), tokenize=False, add_generation_prompt=answer, **kwargs
            )
        except Exception as error:  # jinja2 errors, and any error of a template
            raise _refused(messages, error) from error
        return rendered

    def _as_read(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages with content in the form that the template reads."""
        if not self._parts_only:
            return [dict(m) for m in messages]
        parts = ([{"type": "text", "text": c}] if isinstance(c := m.get("content"), str) else c for m in messages)
        return [{**m, "content": content} for m, content in zip(messages, parts, strict=True)]

    def _require_content(self) -> None:
        """Raises ConfigError if the template writes the same text for every user message."""
        asked = [[{"role": "user", "content": content}] for content in ("one", "two")]
        try:
            first, second = (self.text(messages, answer=True) for messages in asked)
        except DataError:  # it needs other messages; an error about a row will say which
            return
        if first == second:
            self._parts_only = True
            with suppress(DataError):  # it reads no parts either
                first, second = (self.text(messages, answer=True) for messages in asked)
        if first == second:
            raise ConfigError(
                f"the chat template writes {first[:60]!r} for every user message, so every row would have the same "
                "prompt. Use a template that writes messages: see data.chat_template."
            )

    def render(self, messages: Sequence[Message], trained: Sequence[int], as_asked: bool = True) -> Render:
        """One render with the spans of the assistant messages ``trained`` (indices into ``messages``).

        ``as_asked``: refuse an answer that does not follow the same text that the policy is given when it answers.
        """
        if _GENERATION.search(self._source):
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
            asked = messages if as_asked else None
            mine = [i for i, number in enumerate(order) if texts[number].message == m]
            if mine:
                starts[m] = self._start(text, pieces[2 * mine[0]], places[mine[0]][0], m, asked)
                tail = tails[m] if order[mine[-1]] == last[m] else ""
                ends[m] = places[mine[-1]][1] + tail_length(pieces[2 * mine[-1] + 2], tail, m)
            else:  # tool calls only
                starts[m] = ends[m] = self._given(text, messages, m)
            if messages[m].get("tool_calls"):
                following = next((first for first, _ in places if first > ends[m]), len(text))
                ends[m] = self._end_of_calls(text, messages, m, ends[m], following)
        plain = [m for m in trained if not messages[m].get("tool_calls")]
        if plain:
            end = self.end_token(text[ends[plain[-1]] :]) if plain[-1] == trained[-1] else self.answer_end
            ends |= {m: _including(end, text, ends[m]) for m in plain}
        return Render(text, tuple((starts[m], ends[m]) for m in trained))

    def end_token(self, following: str) -> str:
        """The special token that follows an answer's text, ignoring white space between them."""
        following = following.lstrip()
        return max((t for t in self._known if following.startswith(t)), key=len, default="")

    @cached_property
    def answer_end(self) -> str:
        """The end token of an answer that is text; empty if the template writes none."""
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        try:
            render = self.render(turns, [1], as_asked=False)
        except DataError:  # it needs other messages
            return ""
        answer = render.text[: render.answers[0][1]]
        return max((t for t in self._known if answer.endswith(t)), key=len, default="")

    # ------------------------------------------------------------------------------------- inside

    def _marked_by_template(self, messages: Sequence[Message], trained: Sequence[int]) -> Render:
        from transformers.utils.chat_template_utils import render_jinja_template

        names = self._tokenizer.special_tokens_map
        rendered: Any
        try:
            rendered, spans = render_jinja_template(  # type: ignore[str-unpack]
                [self._as_read(messages)], chat_template=self._source, return_assistant_tokens_mask=True,
                **{**names, **self._kwargs},
            )  # fmt: skip
        except Exception as error:  # as in `text`
            raise _refused(messages, error) from error
        assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if len(spans[0]) != len(assistants):
            raise DataError(
                f"the chat template marks {len(spans[0])} passages with {{% generation %}} for {len(assistants)} "
                "assistant messages; it must mark one for each"
            )
        by_message = dict(zip(assistants, spans[0], strict=True))
        return Render(rendered[0], tuple((int(by_message[m][0]), int(by_message[m][1])) for m in trained))

    @cached_property
    def _known(self) -> frozenset[str]:
        """Special and added tokens."""
        return frozenset([*self._tokenizer.all_special_tokens, *self._tokenizer.get_added_vocab()])

    def _check(
        self, messages: Sequence[Message], trained: Sequence[int], texts: Sequence[Text], order: Sequence[int]
    ) -> None:
        for m in trained:
            mine = [n for n, text in enumerate(texts) if text.message == m]
            if not mine and not messages[m].get("tool_calls"):
                raise DataError(
                    f"message {m} (assistant) has no text, so where it stands in the chat template's render cannot be "
                    "told. Mark answers in the template with {% generation %} ... {% endgeneration %}."
                )
            lost = [n for n in mine if order.count(n) != 1]
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
        until = text if message == len(messages) - 1 else self.text(messages[: message + 1], answer=False)
        until = until.rstrip()
        alone = text.startswith(until) and len(until) > position
        end = self.answer_end
        at = text.find(end, position, len(until) if alone else following) if end else -1
        if at >= 0:
            return at + len(end)
        if alone:  # another end token, or none
            return len(until)
        raise DataError(
            f"the chat template writes message {message} (assistant) otherwise once other messages follow, so where "
            'its tool calls end cannot be told. Train on the last answer (data.loss_on = "completion"), or mark '
            "answers in the template with {% generation %} ... {% endgeneration %}."
        )

    def _generation_head(self) -> str:
        """The text that ``add_generation_prompt`` adds; empty if it adds none."""
        if self._head is None:
            user = [{"role": "user", "content": "x"}]
            without, ready = self.text(user, answer=False), self.text(user, answer=True)
            self._head = ready[len(without) :] if ready.startswith(without) else ""
        return self._head

    def _start(self, text: str, piece: str, position: int, message: int, asked: Sequence[Message] | None) -> int:
        """Start of an answer whose text is preceded by ``piece``, which ends at ``position`` of the render. The answer
        starts after the generation prompt, so text that the template adds between it and the answer's text (an empty
        think block) is part of the answer. Without a generation prompt it starts after the text that the policy is
        given, so a space or a tag before the text is part of the answer.

        Args:
            asked: the whole conversation, if the answer is trained on. The answer must then follow the same text that
                the policy is given when it answers.

        Raises DataError: it follows another text (Qwen3 without thinking: only the last answer has the empty block), so
            the policy would never answer in this context.
        """
        head = self._generation_head()
        at = piece.rfind(head) if head else -1
        if at >= 0 or asked is None:
            return position if at < 0 else position - len(piece) + at + len(head)
        if not head and position - len(piece) <= (given := self._given(text, asked, message, piece)) <= position:
            return given
        raise self._unseen(message, piece)

    def _given(self, text: str, messages: Sequence[Message], message: int, piece: str = "") -> int:
        """End of the text that the policy is given when it answers with ``message``, which must begin the render."""
        given = self.text(messages[:message], answer=True) if message else ""
        if text.startswith(given):
            return len(given)
        raise self._unseen(message, piece or text[: len(given)])

    def _unseen(self, message: int, before: str) -> DataError:
        head = self._generation_head()
        what = f"{head!r}" if head else "nothing that opens an answer, but the messages before it,"
        return DataError(
            f"the policy is given {what} before it answers, but the chat template writes message {message} "
            f"(assistant) after {before[-60:]!r}: it would be trained in a context that it never sees. Train on the "
            'last answer (data.loss_on = "completion"), set other data.template_kwargs, or mark answers in the '
            "template with {% generation %} ... {% endgeneration %}."
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
        forms = (
            [value.text] if value.message in trained else [value.text, json.dumps(value.text, ensure_ascii=False)[1:-1]]
        )
        written = next((f for f in forms if text.startswith(f + pieces[number + 1], position)), value.text)
        places.append((position, position + len(written)))
        position += len(written)
    if len(places) == len(texts) and text[position:] == pieces[-1]:
        return places
    raise DataError(
        "the chat template changes the text of messages (beyond trimming), so the tokens of the answer cannot "
        "be found. Mark answers in the template with {% generation %} ... {% endgeneration %}, "
        'or use template = "plain".'
    )


def _refused(messages: Sequence[Message], error: Exception) -> DataError:
    roles = ", ".join(str(m.get("role")) for m in messages)
    return DataError(f"the chat template refuses the messages ({roles}): {type(error).__name__}: {error}")


def _including(end: str, text: str, position: int) -> int:
    """The position after the end token if it follows (ignoring white space), else ``position``. Some templates end only
    the last answer with it, others also the user's messages."""
    following = text[position:].lstrip()
    return len(text) - len(following) + len(end) if end and following.startswith(end) else position
