"""The conformance suite of rewards, against a judge on this machine."""

import pytest
from judge_server import JudgeServer
from rlhf_plugin_judge import JudgeReward
from rlhf_testing.reward import RewardContract


class TestJudge(RewardContract):
    reward = JudgeReward
    deterministic = False  # the second call finds its judgements in the cache and costs nothing
    cases = (({"prompt": "ab"}, "four", 3 / 9), ({"prompt": "ab"}, "ten letter", 1.0))

    @pytest.fixture(autouse=True)
    def server(self):
        with JudgeServer() as server:
            config = {"url": server.url, "model": "judge"}
            self.configs = (JudgeReward.Config(**config), JudgeReward.Config(**config, mode="pairwise"))
            yield
