"""The conformance suite of adapters. The adapter recognises its files by their text."""

from __future__ import annotations

from rlhf_plugin_openrlhf import OpenRLHF
from rlhf_testing.adapter import AdapterContract

REWARD = """
from openrlhf.utils import grade_answer

def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": [float(grade_answer(queries[0], labels[0]))]}
"""
AGENT = """
from openrlhf.utils import agent

class AgentInstance(agent.AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        pass

    async def step(self, states, **kwargs):
        return {"rewards": 0.0, "done": True}

class AgentExecutor(agent.MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
EXECUTOR = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        return {}
"""


class TestConformance(AdapterContract):
    adapter = OpenRLHF
    files = [
        ("reward", REWARD, None),
        ("env", AGENT, None),
        ("env", AGENT, "AgentInstance"),
        ("rollout", EXECUTOR, None),
    ]
