"""Find each answer in the render of a chat template.

The text that is tokenised is always ONE render of the whole conversation. A second render, in which every text is
replaced by a marker, shows which characters belong to which message: replacing the markers by the texts must give the
first render exactly. A template that rewrites or drops a message's text fails this check and is refused; the error
names the message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlhf.errors import ConfigError, DataError

from rlhf_runtime.data.row_fields import Message
from rlhf_runtime.data.template_markers import MARKER, tail_length, with_markers
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
        skeleton = self.text(marked, answer=False)
        pieces = MARKER.split(skeleton)  # text, number, text, number, ..., text
        order = [int(n) for n in pieces[1::2]]
        self._check(messages, trained, texts, order)
        position, starts, ends = 0, dict[int, int](), dict[int, int]()
        last = {message: number for number, (message, _) in enumerate(texts)}
        rebuilt: list[str] = []
        for number, piece in zip([None, *order], pieces[0::2], strict=True):
            if number is not None:
                message, value = texts[number]
                if message not in starts:
                    asked = messages if as_asked and message in trained else None
                    starts[message] = self._start(text, rebuilt[-1], position, message, asked)
                rebuilt.append(value)
                position += len(value)
                tail = tails[message] if number == last[message] else ""
                ends[message] = position + tail_length(piece, tail, message if message in trained else None)
            rebuilt.append(piece)
            position += len(piece)
        if "".join(rebuilt) != text:
            raise DataError(
                "the chat template changes the text of messages (beyond trimming), so the tokens of the answer cannot "
                "be found. Mark answers in the template with {% generation %} ... {% endgeneration %}, "
                'or use template = "plain".'
            )
        end = self.end_token(text[ends[trained[-1]] :])
        return Render(text, tuple((starts[m], _including(end, text, ends[m])) for m in trained))

    def end_token(self, following: str) -> str:
        """The special token that follows an answer's text, ignoring white space between them."""
        known = {*self._tokenizer.all_special_tokens, *self._tokenizer.get_added_vocab()}
        following = following.lstrip()
        return max((t for t in known if following.startswith(t)), key=len, default="")

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

    def _check(
        self,
        messages: Sequence[Message],
        trained: Sequence[int],
        texts: Sequence[tuple[int, str]],
        order: Sequence[int],
    ) -> None:
        for m in trained:
            mine = [n for n, (message, _) in enumerate(texts) if message == m]
            if not mine:
                raise DataError(
                    f"message {m} (assistant) has no text, so where it stands in the chat template's render cannot be "
                    "told. Mark answers in the template with {% generation %} ... {% endgeneration %}."
                )
            lost = [n for n in mine if order.count(n) != 1]
            if lost:
                shown = texts[lost[0]][1]
                raise DataError(
                    f"the chat template leaves out part of message {m} (assistant): {shown[:60]!r}. It rewrites "
                    "history, e.g. strips the reasoning of earlier answers, so training on all answers would miss "
                    'what they say. Train on the last one (data.loss_on = "completion"), give one row per answer, '
                    "or use a template that keeps them."
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
        if not head:
            given = self.text(asked[:message], answer=True) if message else ""
            if position - len(piece) <= len(given) <= position and text.startswith(given):
                return len(given)
        what = f"{head!r}" if head else "nothing that opens an answer, but the messages before it,"
        raise DataError(
            f"the policy is given {what} before it answers, but the chat template writes message {message} "
            f"(assistant) after {piece[-60:]!r}: it would be trained in a context that it never sees. Train on the "
            'last answer (data.loss_on = "completion"), set other data.template_kwargs, or mark answers in the '
            "template with {% generation %} ... {% endgeneration %}."
        )


def _refused(messages: Sequence[Message], error: Exception) -> DataError:
    roles = ", ".join(str(m.get("role")) for m in messages)
    return DataError(f"the chat template refuses the messages ({roles}): {type(error).__name__}: {error}")


def _including(end: str, text: str, position: int) -> int:
    """The position after the end token if it follows (ignoring white space), else ``position``. Some templates end only
    the last answer with it, others also the user's messages."""
    following = text[position:].lstrip()
    return len(text) - len(following) + len(end) if end and following.startswith(end) else position
