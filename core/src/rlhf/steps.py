"""Find the tokens that end the steps of a solution, with one rule for training rows and for sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

STEP_SEPARATOR = "step_separator"
"""Key in the ``config.json`` of a model trained on labelled steps: the separator that followed each step."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Stands in decoded text for a character whose bytes are incomplete."""


class StepEnds:
    """Finds the ends of steps in token ids. A step is text that is not blank, up to the first separator after it. It
    ends at the token in which that separator ends.

    So two separators in a row, as two tokens or as one, end one step, and text before the first separator belongs to
    the first step. A token that contains the ends of two steps is listed twice. The rule does not depend on how the
    text was split into tokens, so training rows and sampled tokens are treated alike.

    Args:
        decode: text of token ids with special tokens, because the separator may be one
            (:attr:`rlhf.interfaces.Tokens.decode`).
        separator: text after each step; not empty.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], separator: str) -> None:
        if not separator:
            raise ValueError("the separator of steps is empty; a step ends after some text, e.g. '\\n'")
        self.decode, self.separator = decode, separator
        self._pieces: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[int]:
        """Positions in ``ids``, in order, of the tokens that end a step. Text after the last separator is not a
        step."""
        ends: list[int] = []
        start = offset = 0  # the current step starts `offset` characters into the text of ids[start:]
        for i, token in enumerate(ids):
            if not self._may_end(token):
                continue
            text = self.decode(ids[start : i + 1])
            while (end := self._end(text, offset)) is not None:
                ends.append(i)
                offset = end
            # The text so far need not be decoded again, also not if blank text is left after a blank separator ("\n" in
            # a token ".\n\n"): it is in no step, and no separator that ends a step can begin in it.
            rest = text[offset:]
            if ends and ends[-1] == i and (not rest or not (rest + self.separator).strip()):
                start, offset = i + 1, 0
        return ends

    def count(self, text: str) -> int:
        """Number of steps that end in a text."""
        steps = offset = 0
        while (end := self._end(text, offset)) is not None:
            steps, offset = steps + 1, end
        return steps

    def _end(self, text: str, offset: int) -> int | None:
        """End position of the first separator after text that is not blank; None if there is none."""
        while (index := text.find(self.separator, offset)) >= 0:
            end = index + len(self.separator)
            if text[offset:index].strip():
                return end
            offset = end
        return None

    def _may_end(self, token: int) -> bool:
        """Whether the separator could end in this token. For other tokens the context need not be decoded."""
        if self.separator[-1] == " ":  # many tokenizers drop the space in front of a token that is decoded alone
            return True
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self.decode([token])
        return self.separator[-1] in piece or _BROKEN in piece or not piece
