"""The conformance suite of rollouts."""

import pytest
from rlhf_plugin_agent import Agent
from rlhf_testing.rollout import RolloutContract

BODY = """
messages = [USER]
for _ in range(2):
    status, answer = ask(base_url, api_key, messages)
    if status != 200: raise RuntimeError(answer)
    messages += [answer["choices"][0]["message"], USER]
"""


class TestAgent(RolloutContract):
    rollout = Agent

    @pytest.fixture(autouse=True)
    def written(self, program):
        self.configs = (Agent.Config(**program(BODY)),)
