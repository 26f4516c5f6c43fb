"""Reward: a regular expression or a template that the answer must match."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pydantic import model_validator
from rlhf import hookimpl
from rlhf.interfaces import ComponentConfig, Reward
from rlhf.types import Group, RewardResult, Trajectory

_OPENING = re.compile(r"<[^<>/|\s]+>\s*\Z")
"""An opening tag at the end of a text."""


class FormatConfig(ComponentConfig):
    """Exactly one of ``template`` and ``pattern``."""

    template: str | None = None
    """Text with gaps, e.g. ``<think>{...}</think><answer>{...}</answer>``. No gap ``{...}`` may be empty, each piece of
    text must occur exactly as often as in the template, and white space between tags is allowed. Matched in linear
    time. If the chat template opens the answer with a tag, such as ``<think>``, the text may match with or without
    it."""
    pattern: str | None = None
    """A Python regular expression; ``.`` matches line ends too."""
    mode: Literal["fullmatch", "search"] = "fullmatch"
    """For ``pattern``: match the whole text, or search anywhere in it."""
    on: Literal["answer", "completion"] = "answer"
    """The last sampled turn, or everything after the prompt with the environment's observations."""
    match: float = 1.0
    """Reward of a text of that form."""
    no_match: float = 0.0
    """Reward of every other text."""

    @model_validator(mode="after")
    def _one_form(self) -> FormatConfig:
        if (self.template is None) == (self.pattern is None):
            raise ValueError("set exactly one of `template` and `pattern`")
        if self.template is not None:
            AnswerTemplate.parse(self.template)
        if self.pattern is not None:
            try:
                re.compile(self.pattern, re.DOTALL)
            except re.error as error:
                raise ValueError(f"`pattern` {self.pattern!r} is not a regular expression: {error}") from None
        return self


class FormatReward(Reward):
    """``score`` is plain ``def``, so it runs in a worker process. A pattern that backtracks forever is killed at the
    deadline."""

    name = "format"
    Config = FormatConfig
    reads = "text"
    conformance = {"configs": (FormatConfig(pattern=".*4.*"),)}
    """Config for ``rlhf plugins check``, because the defaults have no form."""

    def __init__(self, config: FormatConfig | None = None) -> None:
        super().__init__(config)
        c = self.config
        self._template = None if c.template is None else AnswerTemplate.parse(c.template)
        self._pattern = None if c.pattern is None else re.compile(c.pattern, re.DOTALL)

    def score(self, group: Group) -> list[RewardResult]:
        c = self.config
        return [RewardResult(c.match if self._has_form(t) else c.no_match) for t in group.trajectories]

    def texts(self) -> Collection[str]:
        if self._template is not None:
            return [piece for _, piece in self._template.pieces]
        return [(self.config.pattern or "").replace("\\", "")]  # without the escapes of characters in tags

    def _has_form(self, trajectory: Trajectory) -> bool:
        """Whether the text matches, alone or after the tag with which the chat template opens it."""
        on_answer = self.config.on == "answer"
        text = trajectory.answer if on_answer else trajectory.completion
        sampled = [n for n, turn in enumerate(trajectory.turns) if turn.sampled]
        first = sampled[-1 if on_answer else 0] if sampled else 0
        while first and trajectory.turns[first - 1].sampled:  # an answer may be several turns
            first -= 1
        opening = _OPENING.search(trajectory.turns[first - 1].text) if first else None
        return self._matches(text) or (opening is not None and self._matches(opening[0] + text))

    def _matches(self, text: str) -> bool:
        if self._template is not None:
            return self._template.matches(text)
        assert self._pattern is not None
        return getattr(self._pattern, self.config.mode)(text) is not None


GAP = "{...}"


@dataclass(frozen=True, slots=True)
class AnswerTemplate:
    """Literal pieces in order, some with a gap before them. White space between tags and at both ends is allowed."""

    pieces: tuple[tuple[bool, str], ...]
    """(whether a gap precedes the piece, literal)."""
    open_end: bool
    """The template ends with a gap."""

    @classmethod
    def parse(cls, text: str) -> AnswerTemplate:
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
        # the counts first: then no search needs to try another occurrence, and the time is linear
        if any(text.count(piece) != count for piece, count in self._counts().items()):
            return False
        position = 0
        for gap, piece in self.pieces:
            start = text.find(piece, position)
            if start < 0 or bool(text[position:start].strip()) != gap:
                return False
            position = start + len(piece)
        return bool(text[position:].strip()) == self.open_end

    def _counts(self) -> dict[str, int]:
        """The number of occurrences of each piece in the template, also inside others: ``A:`` occurs twice in
        ``A: {...} AA: {...}``."""
        pieces = [piece for _, piece in self.pieces]
        return {piece: sum(other.count(piece) for other in pieces) for piece in pieces}


@hookimpl
def rlhf_register_reward() -> list[type]:
    return [FormatReward]
