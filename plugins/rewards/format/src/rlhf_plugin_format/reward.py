"""The reward: one value if the answer has the required form, another if it does not."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import model_validator
from rlhf.interfaces import ComponentConfig, Reward
from rlhf.types import Group, RewardResult

from rlhf_plugin_format.template import Template


class FormatConfig(ComponentConfig):
    """Exactly one of ``template`` and ``pattern``."""

    template: str | None = None
    """Text with gaps, e.g. ``<think>{...}</think><answer>{...}</answer>``. No gap ``{...}`` may be empty, each piece of
    text must occur exactly as often as in the template, and white space between tags is allowed. Matched in linear
    time."""
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
            raise ValueError("give exactly one of `template` and `pattern`")
        if self.template is not None:
            Template.parse(self.template)
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
        self._template = None if c.template is None else Template.parse(c.template)
        self._pattern = None if c.pattern is None else re.compile(c.pattern, re.DOTALL)

    def score(self, group: Group) -> list[RewardResult]:
        c = self.config
        texts = [t.answer if c.on == "answer" else t.completion for t in group.trajectories]
        return [RewardResult(c.match if self._matches(text) else c.no_match) for text in texts]

    def _matches(self, text: str) -> bool:
        if self._template is not None:
            return self._template.matches(text)
        assert self._pattern is not None
        return getattr(self._pattern, self.config.mode)(text) is not None
