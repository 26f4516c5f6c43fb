"""A taskset of verifiers, and a program that plays one of its tasks with the policy: the rollout `agent` runs it."""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf


class AddingData(vf.TaskData):
    answer: str


class AddingTask(vf.Task[AddingData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class AddingTaskset(vf.Taskset[AddingTask, vf.TasksetConfig]):
    def load(self):
        for a in range(10):
            yield AddingTask(AddingData(prompt=f"{a}+1=", answer=str(a + 1)), self.config.task)


__all__ = ["AddingTaskset"]


async def play(row: dict) -> float:
    config = vf.SingleAgentEnvConfig(
        taskset={"id": "adding"},
        agent=vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig()),
    )
    env = vf.SingleAgentEnv(config)
    task = list(env.taskset)[row["task"]]
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(
            task, vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
        )
    (trace,) = episode.traces
    if episode.errors or trace.errors:
        raise RuntimeError(f"{episode.errors} {trace.errors}")
    return trace.reward


if __name__ == "__main__":
    reward = asyncio.run(play(json.load(sys.stdin)))
    with os.fdopen(int(os.environ["RLHF_RESULT_FD"]), "w") as result:
        json.dump({"reward": reward}, result)
