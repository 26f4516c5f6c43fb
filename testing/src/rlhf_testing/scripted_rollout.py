"""A context and an environment for rollouts, with made-up answers: no model, no tokenizer, no torch."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf.errors import RolloutError
from rlhf.interfaces.env import Env
from rlhf.interfaces.rollout import RolloutContext
from rlhf.types import EnvStep, Row, Sampling, Turn

from rlhf_testing.contract import expect

Messages = Sequence[Mapping[str, Any]]


AGENTS = ("a", "b")
"""The agents of a scripted game."""


class ScriptedEnv(Env):
    """Answers with one text per turn, is done after ``turns`` turns, and raises at turn ``fails_at``. Counts the calls
    of ``close``.

    With ``agents``, the agents play in turn, and each turn also gives every agent a reward of 1."""

    name = "scripted"

    def __init__(self, turns: int = 3, fails_at: int | None = None, agents: Sequence[str] = ()) -> None:
        super().__init__()
        self.turns, self.fails_at, self.steps, self.closed = turns, fails_at, 0, 0
        self.names = agents

    async def reset(self, row: Row, seed: int) -> str | EnvStep:
        return EnvStep("begin a", agent=self.names[0]) if self.names else "begin"

    async def step(self, action: str) -> EnvStep:
        self.steps += 1
        if self.closed:
            raise AssertionError("step() after close()")
        if self.steps == self.fails_at:
            raise ValueError("the environment breaks here")
        sampling = Sampling(max_new_tokens=5, temperature=0.5) if self.steps == 1 else None
        step = EnvStep(f"turn {self.steps}", 0.25 * self.steps, self.steps >= self.turns, sampling)
        if not self.names:
            return step
        agent = self.names[self.steps % len(self.names)]
        return replace(step, agent=agent, rewards=dict.fromkeys(self.names, 1.0))

    async def close(self) -> None:
        self.closed += 1


@dataclass
class Call:
    """One request for a turn: its context and the answer."""

    context: tuple[int, ...]
    sampling: Sampling
    number: int
    turn: Turn


@dataclass
class ScriptedContext(RolloutContext):
    """A RolloutContext with a byte tokenizer and made-up answers that depend on the seed."""

    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=6, temperature=0.7))
    max_tokens: int = 400
    env_turns: int = 3
    fails_at: int | None = None
    agents: Sequence[str] = ()
    calls: list[Call] = field(default_factory=list)
    envs: list[ScriptedEnv] = field(default_factory=list)
    generating: bool = False
    """Whether a turn is being generated."""
    side_turns: list[Turn] = field(default_factory=list)
    """Turns that were requested with ``training = False``."""
    uses_base: bool = False
    """Whether the rollout requested turns of the policy's base."""
    scores: bool = False
    """Whether the rollout scored answers."""

    def encode_prompt(self, row: Row) -> Turn:
        text = str(row["prompt"])
        return Turn(list(text.encode()), sampled=False, text=text)

    def encode_observation(self, text: str, images: Sequence[bytes] = (), turn: Turn | None = None) -> Turn:
        return Turn(list(f"<{text}>".encode()), sampled=False, text=text)

    def prompt_messages(self, row: Row) -> list[dict[str, Any]]:
        return [{"role": "user", "content": str(row["prompt"])}]

    def encode_messages(self, messages: Messages, tools: Messages = ()) -> Turn:
        text = "".join([f"<{m['role']}:{m.get('content') or ''}>" for m in messages])
        return Turn(list(f"{len(tools) or ''}{text}".encode()), sampled=False, text=text)

    def encode_following(
        self,
        messages: Messages,
        answer: Mapping[str, Any],
        following: Messages,
        tools: Messages = (),
        turn: Turn | None = None,
    ) -> Turn | None:
        return self.encode_messages(following)

    def parse_answer(self, turn: Turn, tools: Messages = ()) -> dict[str, Any]:
        """Every answer except the last of ``env_turns`` calls the first tool."""
        answer: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if tools and len(self.calls) < self.env_turns:
            call = {"name": tools[0]["function"]["name"], "arguments": "{}"}
            answer["tool_calls"] = [{"id": f"call{len(self.calls)}", "type": "function", "function": call}]
        return answer

    async def generate(self, turns: list[Turn], sampling: Sampling, turn_number: int = 0) -> Turn:
        is_list = isinstance(turns, list) and all(isinstance(turn, Turn) for turn in turns)
        expect(is_list, f"ctx.generate() takes the turns so far, a list of Turn, got {turns!r:.60}")
        start = max((i for i, t in enumerate(turns) if t.fresh), default=0)
        context = tuple(i for t in turns[start:] for i in t.ids)
        room = min(sampling.max_new_tokens, self.max_tokens - len(context))
        if room <= 0:
            raise RolloutError(f"{len(context)} tokens leave no room within {self.max_tokens}")
        if self.generating:
            raise RolloutError("generate() was called while another turn of the sample is generated: generate_each()")
        self.generating = True
        # other tasks run meanwhile, so that a second request at the same time is noticed
        await asyncio.sleep(0)
        self.generating = False
        rng = random.Random(f"{context}/{turn_number}")
        ids = [rng.randrange(97, 123) for _ in range(rng.randint(1, room))]
        turn = Turn(
            ids,
            True,
            [-rng.random() for _ in ids],
            ((0, 0),),
            "length" if len(ids) == room else "stop",
            sampling.temperature,
            text=bytes(ids).decode(),
        )
        # a copy, because the rollout may change the turn that it gets
        self.calls.append(Call(context, sampling, turn_number, copy.deepcopy(turn)))
        return turn

    async def generate_each(
        self,
        requests: Sequence[tuple[list[Turn], Sampling]],
        first_number: int = 0,
        training: bool = True,
        base: bool = False,
    ) -> list[Turn]:
        expect(not (base and training), "ctx.generate_each(..., base=True) needs training=False")
        self.uses_base = self.uses_base or base
        turns = await super().generate_each(requests, first_number)
        if not training:
            self.side_turns += turns
        return turns

    async def score(self, row: Row, answers: Sequence[list[Turn]]) -> list[float]:
        """1 for an even number of tokens, else 0."""
        for turns in answers:
            is_answer = isinstance(turns, list) and bool(turns) and not turns[0].sampled and turns[-1].sampled
            expect(is_answer, f"ctx.score() takes all turns of each answer, the prompt first, got {turns!r:.60}")
        await asyncio.sleep(0)
        self.scores = True
        return [float(sum(len(t.ids) for t in turns) % 2 == 0) for turns in answers]

    async def open_env(self) -> Env:
        env = ScriptedEnv(self.env_turns, self.fails_at, self.agents)
        self.envs.append(env)
        return env

    async def finish(self) -> None:
        """Close the environment, as the core does at the end of every sample, also of a failed one."""
        for env in self.envs:
            await env.close()
