"""The conformance suite of environments."""

from rlhf_plugin_gymnasium import GymnasiumEnv
from rlhf_testing.env import EnvContract

Config = GymnasiumEnv.Config


class TestGymnasium(EnvContract):
    env = GymnasiumEnv
    configs = (
        Config(id="FrozenLake-v1", actions=("left", "down", "right", "up")),
        Config(id="Blackjack-v1", on_invalid="end", invalid_reward=-1.0),
        Config(id="CartPole-v1", answer="tag"),
    )
    rows = ({"prompt": "Play."}, {"prompt": "Play.", "seed": 3})
    actions = ("1", "right", "", "\N{SNOWMAN}", "<answer>0</answer>")
