"""The conformance suite of environments, against a server on this machine."""

import pytest
from gym_server import GymServer, row
from rlhf_plugin_nemo_gym import NemoGym
from rlhf_testing.env import EnvContract


class TestNemoGym(EnvContract):
    env = NemoGym
    rows = (row(), row(wanted=5))
    actions = (
        '<tool_call>{"name": "add", "arguments": {"count": 2}}</tool_call>',
        "<tool_call>broken</tool_call>",
        "3",
    )

    @pytest.fixture(autouse=True)
    def server(self):
        with GymServer() as server:
            self.configs = (NemoGym.Config(url=server.url),)
            yield
