"""The number of tokens that are left of ``data.max_tokens``, which counts prompt, observations and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf.errors import RolloutError
from rlhf.interfaces import RolloutContext
from rlhf.types import Sampling, Turn


def room(turns: Sequence[Turn], ctx: RolloutContext) -> int:
    """Tokens that may still follow ``turns``."""
    return ctx.max_tokens - sum(len(t.ids) for t in turns)


def within_budget(sampling: Sampling, left: int, label: str) -> Sampling:
    """A copy of ``sampling`` for this sample, with at most ``left`` new tokens.

    Raises RolloutError if no token is left.
    """
    if left < 1:
        raise RolloutError(
            f"{label} leaves no room for an answer: {1 - left} tokens too many. Raise data.max_tokens or set "
            "data.max_prompt_tokens with data.too_long = 'drop'."
        )
    return sampling if sampling.max_new_tokens <= left else replace(sampling, max_new_tokens=left)
