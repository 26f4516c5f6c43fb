"""The end tokens that a chat template writes after answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.data.tokenizer import special_tokens
from rlhf_runtime.data.written_parts import mark

_USER = {"role": "user", "content": "x"}
_ANSWER = {"role": "assistant", "content": mark(0)}


class AnswerEnds:
    """Determines the tokens that end answers.

    Args:
        text: renders messages (:meth:`TemplateRender.text`). Tools in it do not matter.
    """

    def __init__(self, tokenizer: Any, text: Callable[..., str]) -> None:
        self._text, self._tokenizer_end = text, str(tokenizer.eos_token)
        self.special = tuple(special_tokens(tokenizer))
        """The special tokens of the tokenizer."""
        self._tokens = frozenset([*self.special, *tokenizer.get_added_vocab()])
        """All special and added tokens of the tokenizer."""

    @property
    def tokens(self) -> tuple[str, str]:
        """The end tokens of samples: :attr:`token` and the tokenizer's end token."""
        return self.token, self._tokenizer_end

    @property
    def token(self) -> str:
        """The end token of an answer: the template's end token, else the tokenizer's."""
        return self.of_template or self._tokenizer_end

    @cached_property
    def of_template(self) -> str:
        """The end token that the template writes after an answer that is text; empty if it writes none."""
        return max((t for t in self._tokens if (self.of_text or "").endswith(t)), key=len, default="")

    @cached_property
    def of_text(self) -> str | None:
        """The text that ends an answer of text: :attr:`of_template`, with any text that the template writes before it.
        None if the template needs other messages than a question and an answer."""
        try:
            _, answer, following = self._text([_USER, _ANSWER], answer=False).rpartition(mark(0))
        except DataError:
            return None
        return self.end_in(following) if answer else None

    def end_in(self, following: str) -> str:
        """The end token of an answer, with any text that the template writes before it; empty if there is none.
        ``following``: the rest of a render after the answer's text."""
        rest = following.strip()
        return self.token_in(rest) or (rest if rest.endswith(self.special) else "")

    def token_in(self, following: str) -> str:
        """The special token that follows an answer's text, ignoring white space between them; both tokens if the
        template ends every answer with two."""
        following = following.lstrip()
        if self._two_ends and following.startswith(self._two_ends):
            return self._two_ends
        return self._token_at(following)

    def is_ended(self, text: str) -> bool:
        """Whether a text ends with an end token."""
        return text.endswith(tuple(self._tokens) if self.of_text is None else (*self.special, self.token))

    def _token_at(self, text: str) -> str:
        """The special or added token with which a text begins; empty if it does not begin with one."""
        return max((t for t in self._tokens if text.startswith(t)), key=len, default="")

    @cached_property
    def _two_ends(self) -> str:
        """A token and the tokenizer's end token, if the template ends every answer, including earlier ones, with both
        (Cohere: ``<|END_RESPONSE|><|END_OF_TURN_TOKEN|>``); else empty."""
        try:
            following = self._text([_USER, _ANSWER, _USER], answer=False).rpartition(mark(0))[2]
        except DataError:
            return ""
        first, end = self._token_at(following), self._tokenizer_end
        return first + end if first != end and first and following.startswith(first + end) else ""


def including(end: str, text: str, position: int) -> int:
    """The position after the end token if it follows (ignoring white space), else ``position``. Some templates end only
    the last answer with it, others also the user's messages."""
    following = text[position:].lstrip()
    return len(text) - len(following) + len(end) if end and following.startswith(end) else position
