"""An episode in an environment: answer, observation, answer, ... until its end."""

from __future__ import annotations

from rlhf.interfaces import Rollout, RolloutContext
from rlhf.types import Row, Turn

from rlhf_plugin_turns.budget import room, within_budget


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
