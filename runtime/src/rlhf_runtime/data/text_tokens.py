"""Tokens of texts, alone and as continuations, and their positions in a text. Tokens that a tokenizer adds before a
text must not be inserted between two texts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.data.tokenizer import ENLARGE, decoder_of, embedding_rows

ANCHORS = (".", "x", "\n")
"""A continuation is tokenised after one of these characters."""


class TextTokens:
    """Encodes texts with a tokenizer. Raises DataError for texts without tokens, and for tokens that the model's
    embedding does not have."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._rows = embedding_rows(tokenizer)
        ids: list[int] = tokenizer("", add_special_tokens=True)["input_ids"]
        self._bos = [i for i in ids[:1] if i == tokenizer.bos_token_id]
        """The begin token, if the tokenizer adds one before a text."""

    def begin(self, ids: Sequence[int]) -> list[int]:
        """The tokens that the tokenizer adds before a text; empty if the text already begins with them."""
        return [] if list(ids[:1]) == self._bos else self._bos

    def encoded(self, text: str, **options: Any) -> Any:
        """The tokenizer's result. Raises DataError for lone surrogates, which JSON allows and tokenizers do not, and
        for tokens outside the model's embedding: some published tokenizers have such tokens, which few texts contain.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{text[error.start]!r} (after {text[max(0, error.start - 20) : error.start]!r}) is half of a "
                "character (an unpaired surrogate), which is not valid text"
            ) from None
        encoding = self.tokenizer(text, add_special_tokens=False, **options)
        if self._rows is not None and max(encoding["input_ids"], default=0) >= self._rows:
            largest = max(encoding["input_ids"])
            raise DataError(
                f"the text has the token {self.tokenizer.convert_ids_to_tokens(largest)!r} with id {largest}; the "
                f"model's embedding has {self._rows} rows, so ids are 0 to {self._rows - 1}. {ENLARGE}"
            )
        return encoding

    def ids(self, text: str) -> list[int]:
        """Tokens of a text alone, without the tokens that the tokenizer adds around it."""
        ids: list[int] = self.encoded(text)["input_ids"]
        return ids

    def ids_after(self, prefix: str, text: str) -> list[int]:
        """Tokens of ``text`` as a continuation of ``prefix``, whose tokens are already fixed.

        Tokenizers like SentencePiece add a space before their input, so the tokens of a text alone differ from the
        tokens of a continuation: ``"A: "`` and ``"42"`` would become ``"A:  42"``. With such tokenizers the
        continuation is tokenised after a character, or after the special token at the end of ``prefix``.

        Raises DataError: the character and the text become one token.
        """
        if not prefix or not self._writes_a_space:
            return self.ids(text)
        special_tokens = [*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()]
        special = max((t for t in special_tokens if prefix.endswith(t)), key=len, default="")
        for anchor in [special] if special else ANCHORS:
            front, ids = self.ids(anchor), self.ids(anchor + text)
            if ids[: len(front)] == front:
                return ids[len(front) :]
        raise DataError(
            f"this tokenizer adds a space before each text, so the tokens of {text[:60]!r} after {prefix[-60:]!r} "
            f"cannot be determined; end the prompt before the space, so that the answer starts with it"
        )

    @cached_property
    def _writes_a_space(self) -> bool:
        """Whether the tokenizer adds text before its input, which would appear between two encoded texts."""
        first, second = ANCHORS[:2]
        decode = decoder_of(self.tokenizer)
        joint_ids, separate_ids = self.ids(first + second), [*self.ids(first), *self.ids(second)]
        return decode(joint_ids) == first + second != decode(separate_ids)


Span = tuple[int, int]
"""[start, end) in characters."""


def edges_are_between(offsets: Sequence[Span], edges: Iterable[int]) -> bool:
    """Whether every edge is certainly between two tokens.

    Some tokenizers omit white space from the characters that they report for a token (``trim_offsets`` of byte-level
    ones, such as Pythia's): a token ``" 42"`` is reported to begin at its ``4``, and a token of spaces alone has no
    characters. So a position is uncertain if no token reports the characters at it.

    Args:
        offsets: characters of each token, in order. Several tokens may have the same characters (bytes of one
            character).
        edges: positions in the text.
    """
    positions = sorted(edges)
    claimed = 0
    """End of the characters reported so far."""
    for start, end in offsets:
        # an edge at a token without characters
        if start == end and bisect_left(positions, start) < bisect_right(positions, start):
            return False
        # an edge among characters that no token reports
        if start > claimed and bisect_left(positions, claimed) < bisect_right(positions, start):
            return False
        # an edge within a token
        if bisect_right(positions, start) < bisect_left(positions, end):
            return False
        claimed = max(claimed, end)
    return True
