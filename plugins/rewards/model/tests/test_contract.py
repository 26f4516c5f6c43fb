"""The conformance suite of rewards. The suite replaces the role's model by fixed numbers."""

import json

import pytest
from rlhf_plugin_model import ModelReward
from rlhf_testing.reward import RewardContract


class TestModel(RewardContract):
    reward = ModelReward

    @pytest.fixture(autouse=True)
    def model(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 256, "mean": 0.5, "std": 2.0}))
        self.configs = (
            ModelReward.Config(model=str(tmp_path)),
            ModelReward.Config(model=str(tmp_path), role="judge", normalise=True),
        )
