"""Rollouts: one prompt and one answer (single_turn), or an episode in an environment until its end (multi_turn)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf import hookimpl
from rlhf.errors import RolloutError
from rlhf.interfaces import Rollout, RolloutContext
from rlhf.types import Row, Sampling, Turn


class SingleTurn(Rollout):
    """The prompt and one sampled turn of at most ``sampling.max_new_tokens`` tokens, or fewer if the prompt leaves less
    room in ``data.max_tokens``.

    Raises RolloutError (a failed sample) if the prompt leaves no room for an answer.
    """

    name = "single_turn"
    observes = False

    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        prompt = ctx.encode_prompt(row)
        sampling = within_budget(ctx.sampling, room([prompt], ctx), "the prompt")
        return [prompt, await ctx.generate([prompt], sampling)]


class MultiTurn(Rollout):
    """Prompt and the environment's opening, followed by sampled turns and the environment's observations, until

    * the environment returns ``done`` (at the latest after ``[env] max_turns`` steps),
    * a sampled turn uses the last token of ``data.max_tokens``: its ``finish`` is ``length``, and the environment
      still gets it, because it may have completed the task, or
    * an observation leaves no room for an answer: it is left out, and the turn before it gets ``finish = "length"``.

    So ``Trajectory.truncated`` is true exactly if the token budget ended the episode before the environment did, or if
    the last answer was cut at ``max_new_tokens``. Sampled tokens are never decoded and encoded again.
    ``EnvStep.reward`` and ``EnvStep.score`` become the reward and the score of the sampled turn. ``EnvStep.sampling``
    replaces the sampling parameters of this sample, and of no other, from its next turn on. The observation of the last
    step is not appended, because no answer follows it.

    Raises RolloutError (a failed sample) if prompt and opening leave no room for an answer.
    """

    name = "multi_turn"
    needs_env = True

    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        env = await ctx.open_env()  # closed by the core when the sample ends, also after an error
        sampling = env.sampling = ctx.sampling
        turns = ctx.encode_opening(row, await env.reset(row, seed))  # type: ignore[misc]
        turn_number = 0
        while True:
            now = within_budget(sampling, room(turns, ctx), "the prompt with the environment's opening")
            turn = await ctx.generate(list(turns), now, turn_number)
            turns.append(turn)
            step = await env.step(turn.text)  # type: ignore[misc]
            turn.reward, turn.score = step.reward, step.score
            if step.done:
                return turns
            observation = ctx.encode_observation(step.observation, step.images)
            if room([*turns, observation], ctx) < 1:
                turn.finish = "length"
                return turns
            turns.append(observation)
            sampling = env.sampling = step.sampling or sampling
            turn_number += 1


def room(turns: Sequence[Turn], ctx: RolloutContext) -> int:
    """Tokens of ``data.max_tokens``, which counts prompt, observations and answers, that may still follow ``turns``."""
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


@hookimpl
def rlhf_register_rollout() -> list[type]:
    return [SingleTurn, MultiTurn]
