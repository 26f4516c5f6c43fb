"""One prompt, one answer."""

from __future__ import annotations

from rlhf.interfaces import Rollout, RolloutContext
from rlhf.types import Row, Turn

from rlhf_plugin_turns.budget import room, within_budget


class SingleTurn(Rollout):
    """The prompt and one sampled turn of at most ``sampling.max_new_tokens`` tokens, or fewer if the prompt leaves less
    room in ``data.max_tokens``.

    Raises RolloutError (a failed sample) if the prompt leaves no room for an answer.
    """

    name = "single_turn"

    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        prompt = ctx.encode_prompt(row)
        sampling = within_budget(ctx.sampling, room([prompt], ctx), "the prompt")
        return [prompt, await ctx.generate([prompt], sampling)]
