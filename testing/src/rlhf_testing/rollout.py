"""The conformance suite of rollouts. Imports no torch.

::

    from rlhf_testing.rollout import RolloutContract

    class TestMyRollout(RolloutContract):
        rollout = MyRollout
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlhf.errors import RolloutError
from rlhf.types import Turn

from rlhf_testing import fabricate
from rlhf_testing.contract import Contract, Nonconformance, expect, knowing_columns
from rlhf_testing.scripted_rollout import AGENTS, Call, ScriptedContext


class RolloutContract(Contract):
    """Runs the rollout against a scripted context and environment."""

    kind = "rollout"
    rollout: Any = None
    columns = {"prompt": "What is 2 + 2?", "answer": "4"}
    """The made-up row. It must have every column that the rollout reads."""
    discards: bool = False
    """True for a rollout that drops some of its samples on purpose (best of n, a judge's verdict). Dropped samples are
    neither trained on nor recorded."""
    limit: float = 30.0
    """Maximum seconds for one sample."""

    def run(self, config: Any, **options: Any) -> tuple[ScriptedContext, list[Turn] | None, Exception | None]:
        """(context, turns, error) of one sample; the environment is closed as the core closes it."""
        context, rollout = ScriptedContext(**options), self.build(config)

        async def sample() -> tuple[list[Turn] | None, Exception | None]:
            try:
                row = fabricate.row(self.columns)
                with knowing_columns("it", '"columns": {EACH}'):
                    return _turns(await asyncio.wait_for(rollout.run(row, 3, context), self.limit)), None
            except Exception as error:
                return None, error
            finally:
                await context.finish()

        turns, error = asyncio.run(sample())
        if isinstance(error, Nonconformance):
            raise Nonconformance(f"{self.label(config)} {error}") from error
        if isinstance(error, TimeoutError):
            raise Nonconformance(f"{self.label(config)} one scripted sample took longer than {self.limit} s")
        return context, turns, error

    def good(self, config: Any, **options: Any) -> tuple[ScriptedContext, list[Turn]]:
        context, turns, error = self.run(config, **options)
        if turns is None:
            raise Nonconformance(f"{self.label(config)} raised {type(error).__name__}: {error}") from error
        return context, turns

    # ------------------------------------------------------------------------------------- checks

    def test_turns(self) -> None:
        """The first turn is a prompt. Sampled turns have one log-prob per token, other turns have none."""
        for config in self.grid():
            label = self.label(config)
            context, turns = self.good(config)
            expect(
                bool(turns) and not turns[0].sampled and bool(turns[0].ids), f"{label} the first turn must be a prompt"
            )
            expect(any(t.sampled for t in turns), f"{label} no turn is sampled: there is nothing to learn from")
            for n, turn in enumerate(turns):
                expect(
                    not turn.sampled or all(turn.logprobs is not side.logprobs for side in context.side_turns),
                    f"{label} turn {n} was generated with training = False: it cannot be trained on",
                )
                if turn.sampled:
                    count = None if turn.logprobs is None else len(turn.logprobs)
                    expect(count == len(turn.ids), f"{label} turn {n} has {len(turn.ids)} tokens and {count} log-probs")
                else:
                    expect(turn.logprobs is None, f"{label} turn {n} was not sampled, but has log-probs")

    def test_token_in_token_out(self) -> None:
        """Sampled turns equal the generator's output, and each was generated after exactly the tokens that precede it
        in the trajectory of its agent."""
        for config, context, turns in self._conversations():
            label = self.label(config)
            if not self.build(config).needs_generator:
                expect(not context.calls, f"{label} needs_generator is False, but it generates turns")
                continue
            sampled = [n for n, t in enumerate(turns) if t.sampled]
            expect(
                self.discards or len(sampled) == len(context.calls),
                f"{label} {len(context.calls)} turns were generated, but {len(sampled)} are in the trajectory: "
                "the others are neither trained on nor recorded. A rollout that does so on purpose (best of n) sets "
                'conformance = {"discards": True} in its class, or discards = True in its suite',
            )
            for n, call in zip(sampled, _matching_calls(turns, sampled, context.calls), strict=True):
                turn = turns[n]
                for name in ("ids", "logprobs", "versions", "finish", "temperature"):
                    value, want = getattr(turn, name), getattr(call.turn, name)
                    expect(
                        value == want,
                        f"{label} turn {n}: {name} is {value!r}, but the generator gave {want!r}: "
                        "do not tokenise sampled text again",
                    )
                start = max((i for i in range(n) if turns[i].fresh), default=0)
                stands = tuple(i for t in turns[start:n] for i in t.ids)
                expect(
                    stands == call.context,
                    f"{label} turn {n} was generated after {len(call.context)} tokens, but {len(stands)} different "
                    "ones precede it in the trajectory: mark a rewritten context with fresh=True",
                )
            numbers = [c.number for c in context.calls]
            expect(
                len(set(numbers)) == len(numbers),
                f"{label} turn numbers {numbers} repeat, so turns share their seed: use "
                "ctx.generate(turns, sampling, number)",
            )

    def _conversations(self) -> Iterator[tuple[Any, ScriptedContext, list[Turn]]]:
        """(config, context, turns) of one agent, and of each agent of a game if the rollout plays several."""
        for config in self.grid():
            yield (config, *self.good(config))
            if not self._plays_agents(config):
                continue
            context, turns = self.good(config, agents=AGENTS)
            strangers = sorted({turn.agent for turn in turns} - {*AGENTS})
            expect(not strangers, f"{self.label(config)} turns name the agents {strangers}, not {list(AGENTS)}")
            ordered = sorted(context.calls, key=lambda call: call.number)
            for n, agent in enumerate(AGENTS):
                calls = replace(context, calls=ordered[n :: len(AGENTS)])
                yield config, calls, [turn for turn in turns if turn.agent == agent]

    def _plays_agents(self, config: Any) -> bool:
        rollout = self.build(config)
        return bool(rollout.plays_agents and rollout.needs_env)

    def test_needs_base(self) -> None:
        """A rollout asks for turns of the policy's base only if it says so."""
        for config in self.grid():
            declares = self.build(config).needs_base or not self.good(config)[0].uses_base
            expect(declares, f"{self.label(config)} asks for turns of the base: set needs_base = True")

    def test_gives_rewards(self) -> None:
        """A rollout sets rewards of turns only if it says so, plays an environment, or scores answers by ``score``."""
        for config in self.grid():
            context, turns = self.good(config)
            rollout = self.build(config)
            origin = rollout.gives_rewards or rollout.replays_env or context.envs or context.scores
            expect(
                bool(origin) or all(turn.reward is None for turn in turns),
                f"{self.label(config)} sets Turn.reward, which the run adds to the values of [[reward]]: set "
                "gives_rewards = True, or use ctx.score()",
            )

    def test_repeatable(self) -> None:
        """Equal rows, seeds and answers give equal turns."""
        for config in self.grid():
            first, second = self.good(config)[1], self.good(config)[1]
            expect(first == second, f"{self.label(config)} two runs with equal answers give different turns")

    def test_budget(self) -> None:
        """The rollout ends at its token budget: it neither hangs nor exceeds ``max_tokens``."""
        for config in self.grid():
            label = self.label(config)
            context, turns, error = self.run(config, max_tokens=24, env_turns=50)
            if turns is None:
                expect(
                    isinstance(error, RolloutError), f"{label} out of tokens it raised {error!r}, not a RolloutError"
                )
                continue
            longest = max((len(c.context) + len(c.turn.ids) for c in context.calls), default=0)
            expect(longest <= 24, f"{label} its longest context has {longest} tokens; at most 24 are allowed")

    def test_env_is_closed_once(self) -> None:
        """The environment is closed exactly once, by the core, also after an error. The rollout passes the error on."""
        for config in self.grid():
            label = self.label(config)
            for fails_at in (None, 1):
                context, _, error = self.run(config, fails_at=fails_at)
                for env in context.envs:
                    moment = " after an error" if fails_at else ""
                    expect(
                        env.closed == 1,
                        f"{label} the environment was closed {env.closed} times{moment}: leave closing to the core",
                    )
                    reached = fails_at is not None and env.steps >= fails_at
                    expect(not reached or error is not None, f"{label} swallowed an error of the environment")
            used = bool(self.run(config)[0].envs)
            declared = bool(self.build(config).needs_env)
            expect(
                used == declared, f"{label} needs_env is {declared}, but it {'opens' if used else 'never opens'} one"
            )

    def test_env_rewards(self) -> None:
        """The environment's reward for a turn is on that sampled turn, and on no other."""
        for config in self.grid():
            label = self.label(config)
            context, turns = self.good(config)
            if not context.envs:
                continue
            expect(all(t.reward is None for t in turns if not t.sampled), f"{label} an unsampled turn has a reward")
            total, step_rewards = sum(t.reward or 0.0 for t in turns), [t.reward for t in turns if t.reward]
            expected = [0.25 * n for n in range(1, context.envs[0].steps + 1)]
            advice = "set turn.reward = step.reward on the turn that the step answers"
            expect(
                abs(total - sum(expected)) < 1e-9,
                f"{label} the environment gave {sum(expected)} in total, but the turns hold {total}: {advice}",
            )
            expect(
                step_rewards == expected,
                f"{label} the environment gave {expected}, one for each step, but the turns hold {step_rewards}: "
                f"{advice}",
            )
            if self._plays_agents(config):
                _, turns = self.good(config, agents=AGENTS)
                totals = [sum(t.reward or 0.0 for t in turns if t.agent == agent) for agent in AGENTS]
                expect(
                    totals == [4.0, 3.5],
                    f"{label} the environment gave the agents 4 and 3.5 in total, but their turns hold {totals}: "
                    "step.reward belongs to the agent that acted, step.rewards[agent] to each, from its first turn on",
                )


def _turns(result: Any) -> list[Turn]:
    """Returns the result of ``run``. Fails if its form is wrong."""
    turns = list(result) if isinstance(result, list | tuple) else []
    for value in turns:
        if inspect.iscoroutine(value):
            value.close()
            raise Nonconformance("run() returned ctx.generate() without awaiting it: await ctx.generate(...)")
    if not turns or not all(isinstance(turn, Turn) for turn in turns):
        types = f"{[type(t).__name__ for t in turns]}" if turns else f"{type(result).__name__} {result!r:.60}"
        raise Nonconformance(
            f"run() must return the sample's turns, a list of Turn that starts with its prompt; got {types}"
        )
    return turns


def _matching_calls(turns: Sequence[Turn], sampled: Sequence[int], calls: Sequence[Call]) -> list[Call]:
    """The call that produced each sampled turn: the first remaining call, in order, with the turn's tokens."""
    left, matches = list(calls), []
    for n in sampled:
        candidates = [c for c in left if (c.turn.ids, c.turn.logprobs) == (turns[n].ids, turns[n].logprobs)]
        matches.append(candidates[0] if candidates else left[0])
        left.remove(matches[-1])
    return matches
