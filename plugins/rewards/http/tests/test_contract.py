"""The conformance suite of rewards, against a server on this machine."""

import pytest
from reward_server import RewardServer
from rlhf_plugin_http import HttpReward
from rlhf_testing.reward import RewardContract


class TestHttp(RewardContract):
    reward = HttpReward
    cases = (({"prompt": "ab"}, "cd", 4.0),)

    @pytest.fixture(autouse=True)
    def server(self):
        with RewardServer() as server:
            self.configs = (HttpReward.Config(urls=(server.url,)),)
            yield
