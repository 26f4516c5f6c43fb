"""Texts as tokens, alone and one after another: what a tokenizer puts before a text must not come between two."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rlhf.errors import DataError
from rlhf.steps import decoder_of

ANCHORS = (".", "x", "\n")
"""Behind one of these a text is tokenised that goes on after another."""


class TextTokens:
    """A tokenizer, asked for the tokens of texts. Raises DataError for texts that have none."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._bos = _begin_ids(tokenizer)

    def begin(self, ids: Sequence[int]) -> list[int]:
        """What the tokenizer puts before a text: nothing where the text says it itself."""
        return [] if list(ids[:1]) == self._bos else self._bos

    def encoded(self, text: str, **options: Any) -> Any:
        """The tokenizer's result. Raises DataError for what JSON can hold and no tokenizer takes."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{text[error.start]!r} (behind {text[max(0, error.start - 20) : error.start]!r}) is half of a "
                "character, a surrogate without the other, which is no text"
            ) from None
        return self.tokenizer(text, add_special_tokens=False, **options)

    def ids(self, text: str) -> list[int]:
        """Tokens of a text by itself, without those that the tokenizer puts around it."""
        ids: list[int] = self.encoded(text)["input_ids"]
        return ids

    def ids_after(self, before: str, text: str) -> list[int]:
        """Tokens of ``text`` that goes on where ``before`` ends, whose tokens are fixed already.

        Tokenizers in the manner of SentencePiece write a space before the text that they are given, so the tokens of a
        text alone are not those of its continuation: ``"A: "`` and ``"42"`` would become ``"A:  42"``. With these, what
        goes on is tokenised behind a character, or behind the special token that ``before`` ends with.

        Raises DataError: the character and the text become one token.
        """
        if not before or not self._writes_a_space:
            return self.ids(text)
        known = [*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()]
        special = max((t for t in known if before.endswith(t)), key=len, default="")
        for anchor in [special] if special else ANCHORS:
            front, whole = self.ids(anchor), self.ids(anchor + text)
            if whole[: len(front)] == front:
                return whole[len(front) :]
        raise DataError(
            f"this tokenizer writes a space before the texts that it is given, so the tokens of {text[:60]!r} behind "
            f"{before[-60:]!r} cannot be told; end the prompt before the space, so that the answer starts with it"
        )

    @cached_property
    def _writes_a_space(self) -> bool:
        """Whether the tokenizer puts anything before a text, that two texts in a row would have between them."""
        first, second = ANCHORS[:2]
        decode = decoder_of(self.tokenizer)
        whole, apart = self.ids(first + second), [*self.ids(first), *self.ids(second)]
        return decode(whole) == first + second != decode(apart)


def _begin_ids(tokenizer: Any) -> list[int]:
    """The begin token where the tokenizer puts one before a text."""
    ids: list[int] = tokenizer("", add_special_tokens=True)["input_ids"]
    return [i for i in ids[:1] if i == tokenizer.bos_token_id]
