"""The policy's tokenizer, as far as plugins need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf.errors import ConfigError
from rlhf.types import Row


@dataclass(frozen=True, slots=True)
class Tokens:
    """Text to token ids and back."""

    encode: Callable[[str], list[int]]
    """Token ids of a text, without added special tokens."""
    decode: Callable[[Sequence[int]], str]
    """Text of token ids, including special tokens."""
    opening: Callable[[Row, str], Sequence[int]] | None = None
    """Token ids of a row's prompt as the policy reads it, with a text appended after a blank line (empty: none). None
    if no rows are read."""

    def single(self, text: str, purpose: str) -> int:
        """The id of a text that must be a single token.

        Args:
            purpose: purpose of the token, for the error message.

        Raises ConfigError: the text is several tokens, or none.
        """
        ids = self.encode(text)
        if len(ids) == 1:
            return ids[0]
        parts = ", ".join(f"{i} {self.decode([i])!r}" for i in ids) or "none"
        raise ConfigError(
            f"{purpose}: {text!r} must be one token of the policy's tokenizer, but is {len(ids)} ({parts}). Choose a "
            "text that is one token, or add it to the tokenizer as one."
        )
