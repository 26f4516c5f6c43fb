"""What rollouts need of other rooms: templates, rewards, and where samples get their turns from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rlhf.types import GenerationRequest, Group, Row, Turn

Messages = Sequence[Mapping[str, Any]]
Count = Callable[[int, int], None]
"""Shows progress: called with (number done, number in all)."""


def no_count(number: int, total: int) -> None:
    """Shows nothing."""


class PromptTemplate(Protocol):
    """How rows and observations become tokens (:class:`rlhf_runtime.data.template.Template`)."""

    @property
    def end_token_ids(self) -> tuple[int, ...]: ...

    @property
    def tokenizer(self) -> Any: ...

    def encode_prompt(self, row: Row) -> Turn: ...

    def encode_answer(self, row: Row) -> list[Turn]: ...

    def encode_opening(self, row: Row, text: str) -> list[Turn]: ...

    def encode_observation(self, text: str, closed: bool = True, images: Sequence[bytes] = ()) -> Turn: ...

    def prompt_messages(self, row: Row) -> list[dict[str, Any]]: ...

    def encode_messages(self, messages: Messages, tools: Messages = ()) -> Turn: ...

    def encode_following(
        self,
        before: Messages,
        answer: Mapping[str, Any],
        following: Messages,
        tools: Messages = (),
        closed: bool = True,
    ) -> Turn | None: ...

    def parse_answer(self, turn: Turn, prompt: Sequence[int], key: object, tools: Messages = ()) -> dict[str, Any]: ...

    def has_unread_call(self, answer: Mapping[str, Any]) -> bool: ...


class GroupScorer(Protocol):
    """How a group gets its rewards (:class:`rlhf_runtime.rewards.scoring.Scorer`)."""

    async def score(self, group: Group, trained_on: bool = True) -> object: ...


class Requests(Protocol):
    """How samples get their turns: in waves, or each by itself."""

    async def enter(self, order: tuple[int, ...]) -> None: ...

    async def generate(self, order: tuple[int, ...], request: GenerationRequest) -> Turn: ...

    def leave(self) -> None: ...

    async def settled(self) -> None: ...
