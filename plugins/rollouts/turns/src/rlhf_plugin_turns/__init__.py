"""Rollouts: one prompt and one answer (single_turn), or an episode in an environment until its end (multi_turn)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhf import hookimpl
from rlhf.errors import RolloutError
from rlhf.interfaces import Rollout, RolloutContext
from rlhf.types import EnvStep, Row, Sampling, Turn


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
    * an observation leaves no room for an answer: it is left out, the turn before it gets ``finish = "length"``, and
      the metric ``rollout/no_room`` counts the sample.

    So ``Trajectory.truncated`` is true exactly if the token budget ended the episode before the environment did, or if
    the last answer was cut at ``max_new_tokens``. Sampled tokens are never decoded and encoded again.
    ``EnvStep.reward`` and ``EnvStep.score`` become the reward and the score of the sampled turn. ``EnvStep.sampling``
    replaces the sampling parameters of this sample only, from its next turn on. The observation of the last step is not
    appended, because no answer follows it.

    If the policy plays several agents, each has its own conversation, which begins with the prompt and the agent's
    first observation. An observation without room ends the episode for all agents: the last turn of each agent gets
    ``finish = "length"``.

    Raises RolloutError (a failed sample) if prompt and opening leave no room for an answer.
    """

    name = "multi_turn"
    needs_env = True
    plays_agents = True

    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        env = await ctx.open_env()  # closed by the core when the sample ends, also after an error
        sampling = env.sampling = ctx.sampling
        opening = await env.reset(row, seed)  # type: ignore[misc]
        step = EnvStep(opening) if isinstance(opening, str) else opening
        game = AgentConversations(row, ctx)
        for turn_number in itertools.count():
            fits = game.observe(step)
            ctx.report("no_room", float(not fits))
            if not fits:
                return game.turns()
            turns, sampling = game.conversations[step.agent], step.sampling or sampling
            env.sampling = sampling
            turn_sampling = within_budget(sampling, room(turns, ctx), "the prompt with the environment's opening")
            turn = await ctx.generate(list(turns), turn_sampling, turn_number)
            turn.agent = step.agent
            turns.append(turn)
            step = await env.step(turn.text)  # type: ignore[misc]
            turn.reward, turn.score = step.reward, step.score
            game.reward(step.rewards)
            if step.done:
                break
        return game.turns()


class AgentConversations:
    """The conversations of the agents of one sample. With a single agent there is one conversation, whose name is
    empty."""

    def __init__(self, row: Row, ctx: RolloutContext) -> None:
        self.row, self.ctx = row, ctx
        self.conversations: dict[str, list[Turn]] = {}
        self._owed: dict[str, float] = {}
        """{agent that has no turn yet: sum of its rewards so far}."""

    def turns(self) -> list[Turn]:
        """All turns, conversation by conversation."""
        return [turn for turns in self.conversations.values() for turn in turns]

    def observe(self, step: EnvStep) -> bool:
        """Add the observation of the agent whose turn is next. Returns whether the agent has room to answer. If not,
        nothing is added and the last turn of each agent is marked as cut."""
        turns = self.conversations.get(step.agent)
        if turns is None:
            if step.images:
                raise RolloutError(f"the first observation for {step.agent!r} has images; allowed: text")
            opening = self.ctx.encode_opening(self.row, step.observation)
            self.conversations[step.agent] = [replace(turn, agent=step.agent) for turn in opening]
            return True
        observation = self.ctx.encode_observation(step.observation, step.images, turns[-1])
        if room([*turns, observation], self.ctx) < 1:
            for agent_turns in self.conversations.values():
                agent_turns[-1].finish = "length"
            return False
        turns.append(replace(observation, agent=step.agent))
        return True

    def reward(self, rewards: Mapping[str, float]) -> None:
        """Add each reward to the last turn of its agent, or keep it for the first one."""
        for agent, reward in rewards.items():
            self._owed[agent] = self._owed.get(agent, 0.0) + reward
        for agent in [agent for agent in self._owed if agent in self.conversations]:
            last = self.conversations[agent][-1]
            last.reward = (last.reward or 0.0) + self._owed.pop(agent)


def room(turns: Sequence[Turn], ctx: RolloutContext) -> int:
    """Number of tokens that may still follow ``turns`` within ``data.max_tokens``, which counts prompt, observations
    and answers."""
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
