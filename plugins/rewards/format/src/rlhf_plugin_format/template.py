"""Templates such as ``<think>{...}</think><answer>{...}</answer>``, matched in one pass over the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

GAP = "{...}"


@dataclass(frozen=True, slots=True)
class Template:
    """Literal pieces in order, some with a gap before them. White space between tags and at both ends is allowed."""

    pieces: tuple[tuple[bool, str], ...]
    """(a gap comes before it, literal)."""
    open_end: bool
    """The template ends with a gap."""

    @classmethod
    def parse(cls, text: str) -> Template:
        """Raises ValueError for a template without literal text, and for two adjacent gaps (their boundary would be
        ambiguous)."""
        pieces: list[tuple[bool, str]] = []
        gap = False
        for part in re.split(r"(\{\.\.\.\}|<[^<>]*>)", text):
            if part == GAP:
                if gap:
                    raise ValueError(f"template {text!r} has two gaps {GAP} side by side; put text between them")
                gap = True
            elif part.strip():
                pieces.append((gap, part.strip()))
                gap = False
        if not pieces:
            raise ValueError(f"template {text!r} has no text besides its gaps {GAP}, so everything would match")
        return cls(tuple(pieces), gap)

    def matches(self, text: str) -> bool:
        """Whether every piece occurs exactly as often as in the template, in order, and no gap is empty."""
        if any(text.count(piece) != count for piece, count in self._counts().items()):
            return False
        at = 0
        for gap, piece in self.pieces:
            start = text.find(piece, at)
            if start < 0 or bool(text[at:start].strip()) != gap:
                return False
            at = start + len(piece)
        return bool(text[at:].strip()) == self.open_end

    def _counts(self) -> dict[str, int]:
        """The number of occurrences of each piece in the template, also inside others: ``A:`` occurs twice in
        ``A: {...} AA: {...}``."""
        pieces = [piece for _, piece in self.pieces]
        return {piece: sum(other.count(piece) for other in pieces) for piece in pieces}
