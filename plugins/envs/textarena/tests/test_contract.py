"""The conformance suite of environments."""

from pathlib import Path

from rlhf_plugin_textarena import TextArena
from rlhf_testing.env import EnvContract

OPPONENT = f"file:{Path(__file__).parent / 'opponent.py'}"


class TestTextArena(EnvContract):
    env = TextArena
    configs = (
        TextArena.Config(id="GuessTheNumber-v0", kwargs={"max_number": 9}),
        TextArena.Config(id="2048-v0-3x3"),
        TextArena.Config(id="TicTacToe-v0", opponent=OPPONENT),
        TextArena.Config(id="TicTacToe-v0", opponent="self"),
    )
    rows = ({"prompt": "Play."}, {"prompt": "Play.", "seed": 3})
    actions = ("[5]", "up", "", "\N{SNOWMAN}", "[7]")
