"""The rollout suite passes well-made rollouts and names the rule that a broken one breaks."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from rlhf.errors import RolloutError
from rlhf.interfaces import Rollout
from rlhf.types import Turn
from rlhf_testing.contract import Nonconformance
from rlhf_testing.rollout import RolloutContract


class SingleTurn(Rollout):
    """The complete example of the interface."""

    name = "single_turn"

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_prompt(row)
        return [prompt, await ctx.generate([prompt], ctx.sampling)]


class Episode(Rollout):
    """Several turns."""

    name = "episode"
    needs_env = True

    async def run(self, row, seed, ctx):
        env = await ctx.open_env()
        turns = [*ctx.encode_opening(row, await env.reset(row, seed))]
        number = 0
        while True:
            turn = await ctx.generate(list(turns), ctx.sampling, number)
            step = await env.step(turn.text)
            turns.append(replace(turn, reward=step.reward))
            if step.done:
                return turns
            observation = ctx.encode_observation(step.observation)
            if sum(len(t.ids) for t in [*turns, observation]) >= ctx.max_tokens:
                return turns
            turns.append(observation)
            number += 1


class Rewrites(Episode):
    """Answers twice, the second time on a context of its own."""

    needs_env = False

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_prompt(row)
        first = await ctx.generate([prompt], ctx.sampling, 0)
        short = Turn(list(b"short"), sampled=False, fresh=True)
        second = await ctx.generate([prompt, first, short], ctx.sampling, 1)
        return [prompt, first, short, second]


class TestRewrites(RolloutContract):
    rollout = Rewrites
    registered = False


class Branches(SingleTurn):
    """Two answers at once; each is rewarded by what the other one is not."""

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_prompt(row)
        first, second = await ctx.generate_each([([prompt], ctx.sampling)] * 2)
        left, right = await ctx.score(row, [[prompt, first], [prompt, second]])
        context = Turn(prompt.ids, sampled=False, fresh=True)
        return [prompt, replace(first, reward=left - right), context, replace(second, reward=right - left)]


class TestBranches(RolloutContract):
    rollout = Branches
    registered = False


# ------------------------------------------------------------------------------- broken on purpose


class Overlaps(SingleTurn):
    """Asks for a turn before it has the one before."""

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_prompt(row)
        answers = [ctx.generate([prompt], ctx.sampling, number) for number in range(2)]
        return [prompt, (await asyncio.gather(*answers))[0]]


class PaysItself(SingleTurn):
    """Rewards a turn without saying so."""

    async def run(self, row, seed, ctx):
        prompt, turn = await super().run(row, seed, ctx)
        return [prompt, replace(turn, reward=1.0)]


class ReturnsVerdict(SingleTurn):
    """Returns a turn that may have been drawn from another distribution."""

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_prompt(row)
        greedy = replace(ctx.sampling, temperature=0.0)
        return [prompt, *await ctx.generate_each([([prompt], greedy)], training=False)]


class HidesBase(SingleTurn):
    """Asks for a turn of the base without saying so."""

    async def run(self, row, seed, ctx):
        prompt, turn = await super().run(row, seed, ctx)
        await ctx.generate_each([([prompt], ctx.sampling)], 1, training=False, base=True)
        return [prompt, turn]


class TrainsOnBase(SingleTurn):
    """Asks for a turn of the base to return it."""

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_prompt(row)
        return [prompt, *await ctx.generate_each([([prompt], ctx.sampling)], base=True)]


class ScoresText(SingleTurn):
    """Scores answers without their prompts."""

    async def run(self, row, seed, ctx):
        prompt, turn = await super().run(row, seed, ctx)
        await ctx.score(row, [[turn]])
        return [prompt, turn]


class Retokenises(SingleTurn):
    """Encodes the answer's text again."""

    async def run(self, row, seed, ctx):
        prompt, turn = await super().run(row, seed, ctx)
        ids = list((turn.text + " ").encode())
        return [prompt, replace(turn, ids=ids, logprobs=[0.0] * len(ids))]


class NoLogprobs(SingleTurn):
    """Loses the log-probs."""

    async def run(self, row, seed, ctx):
        prompt, turn = await super().run(row, seed, ctx)
        return [prompt, replace(turn, logprobs=None)]


class ClosesItself(Episode):
    """Closes the environment as well."""

    async def run(self, row, seed, ctx):
        turns = await super().run(row, seed, ctx)
        await ctx.envs[0].close()
        return turns


class Swallows(Episode):
    """Turns an error into a reward of zero."""

    async def run(self, row, seed, ctx):
        try:
            return await super().run(row, seed, ctx)
        except ValueError:
            return await SingleTurn().run(row, seed, ctx)


class ForgetsFresh(Rewrites):
    """Rewrites the context without saying so."""

    async def run(self, row, seed, ctx):
        turns = await super().run(row, seed, ctx)
        turns[2].fresh = False
        return turns


class OneSeed(Episode):
    """Every turn has the same number."""

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_prompt(row)
        turn = await ctx.generate([prompt], ctx.sampling)
        return [prompt, turn, await ctx.generate([prompt, turn], ctx.sampling)]


class Undeclared(Episode):
    """Opens an environment without declaring it."""

    needs_env = False


class DropsRewards(Episode):
    """Leaves the environment's rewards out."""

    async def run(self, row, seed, ctx):
        return [replace(t, reward=None) for t in await super().run(row, seed, ctx)]


class SumsRewards(Episode):
    """Puts all of the environment's rewards on the last turn."""

    async def run(self, row, seed, ctx):
        turns = await super().run(row, seed, ctx)
        total = sum(t.reward or 0.0 for t in turns)
        return [*(replace(t, reward=None) for t in turns[:-1]), replace(turns[-1], reward=total)]


class Wasteful(SingleTurn):
    """Raises an error of its own when the budget is used up."""

    async def run(self, row, seed, ctx):
        turns = [ctx.encode_prompt(row)]
        for number in range(50):
            try:
                turns.append(await ctx.generate(turns, ctx.sampling, number))
            except RolloutError as error:
                raise KeyError("no room") from error
        return turns


def suite(cls, **attributes):
    return type("Broken", (RolloutContract,), {"rollout": cls, "registered": False, **attributes})()


class ForgetsAgents(Episode):
    """Plays a game as one agent."""

    plays_agents = True


class OneConversation(ForgetsAgents):
    """Names the agents of a game that it plays in one conversation."""

    async def run(self, row, seed, ctx):
        turns = await super().run(row, seed, ctx)
        for n, turn in enumerate(turns):
            turn.agent = "ba"[n // 2 % 2] if n > 2 else "a"
        return turns


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (Retokenises, "test_token_in_token_out", "do not tokenise sampled text again"),
        (NoLogprobs, "test_turns", "None log-probs"),
        (ClosesItself, "test_env_is_closed_once", "closed 2 times"),
        (Swallows, "test_env_is_closed_once", "swallowed an error"),
        (ForgetsFresh, "test_token_in_token_out", "fresh=True"),
        (OneSeed, "test_token_in_token_out", "share their seed"),
        (Undeclared, "test_env_is_closed_once", "needs_env is False, but it opens"),
        (DropsRewards, "test_env_rewards", "the turns hold 0.0"),
        (SumsRewards, "test_env_rewards", r"one for each step, but the turns hold \[1.5\]"),
        (ForgetsAgents, "test_token_in_token_out", r"turns name the agents \[''\], not \['a', 'b'\]"),
        (OneConversation, "test_token_in_token_out", "different ones precede it"),
        (ForgetsAgents, "test_env_rewards", r"gave the agents 4 and 3.5 in total, but their turns hold \[0, 0\]"),
        (Wasteful, "test_budget", "not a RolloutError"),
        (Overlaps, "test_turns", r"another turn of the sample is generated: generate_each\(\)"),
        (PaysItself, "test_gives_rewards", "set gives_rewards = True"),
        (ReturnsVerdict, "test_turns", "turn 1 was generated with training = False"),
        (HidesBase, "test_needs_base", "set needs_base = True"),
        (TrainsOnBase, "test_turns", r"base=True\) needs training=False"),
        (ScoresText, "test_turns", "takes all turns of each answer, the prompt first"),
    ],
)
def test_broken_rollout_fails_the_right_check(cls, check, message):
    with pytest.raises(Nonconformance, match=message):
        getattr(suite(cls), check)()
