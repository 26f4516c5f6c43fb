"""The conformance suite of environments."""

from rlhf_plugin_number_game import NumberGame
from rlhf_testing.env import EnvContract


class TestNumberGame(EnvContract):
    env = NumberGame
    configs = (NumberGame.Config(), NumberGame.Config(low=0, high=99, show_range=False))
    rows = ({"prompt": "Find it.", "hidden": 7}, {"prompt": "Find it."})
    actions = ("8", "4?", "nonsense", "", "6", "7", "1000000000000", "5")
