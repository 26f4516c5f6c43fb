"""The rollout: runs the program of a sample and returns its requests to the policy, with the answers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rlhf.errors import RolloutError
from rlhf.interfaces import Rollout, RolloutContext
from rlhf.types import Row, Turn
from rlhf_endpoint.endpoint import Endpoint
from rlhf_endpoint.session import Session

from rlhf_plugin_agent.config import AgentConfig, check_program
from rlhf_plugin_agent.program import AgentProgram, ProgramFailed


class Agent(Rollout):
    """Starts a program for every sample, in a separate process. The program gets the row's columns as its task, the
    address of an OpenAI-compatible endpoint on this machine and a key. The endpoint serves the policy.

    Sampled tokens are never tokenised again. A request that continues a known conversation adds tokens to its sequence;
    any other begins another sequence of the same trajectory. The turns of the sequence that was answered last come
    last.

    Raises RolloutError (a failed sample): the program ends with an error, returns a value that is not a reward, or
    never calls the policy. If the program fails after the conversation has become too long for ``data.max_tokens``, its
    last turn gets ``finish = "length"`` instead, unless the program should return the reward.
    """

    name = "agent"
    needs_messages = True
    Config = AgentConfig
    conformance = {
        "configs": (AgentConfig(command=(sys.executable, str(Path(__file__).with_name("one_question.py")))),)
    }

    def __init__(self, config: AgentConfig) -> None:
        super().__init__(config)
        self.gives_rewards = config.returns_reward
        self.concurrency = config.concurrency
        self._endpoint = Endpoint(config)
        self._starting = asyncio.Lock()  # processes start one by one, because each start blocks the event loop briefly

    def check(self) -> None:
        check_program(self.config)

    async def run(self, row: Row, seed: int, ctx: RolloutContext) -> list[Turn]:
        session = Session(ctx)
        async with self._endpoint.serve(session) as (base_url, key):
            try:
                program = AgentProgram(self.config, row.columns, base_url, key, seed)
                async with self._starting:
                    await program.start()
                async with program:
                    reward, failure = await self._result(program, session)
                turns = await session.close()
            except BaseException:
                await session.cancel()
                raise
            if session.broken.done():
                session.broken.result()
        last = next((turn for turn in reversed(turns) if turn.sampled), None)
        if failure is not None:
            if last is None or not session.out_of_tokens or self.config.returns_reward:
                raise RolloutError(str(failure)) from failure
            last.finish = "length"
        if last is None:
            raise RolloutError(
                "the program ended without an answer from the policy. It must send requests to the endpoint whose "
                "address and key it receives (base_url and api_key, or OPENAI_BASE_URL and OPENAI_API_KEY)"
            )
        last.reward = reward
        return turns

    async def _result(self, program: AgentProgram, session: Session) -> tuple[float | None, ProgramFailed | None]:
        """The reward, or the failure. Raises the run's error if that ended the sample earlier."""
        try:
            return await session.during(program.reward()), None
        except ProgramFailed as failure:
            return None, failure
