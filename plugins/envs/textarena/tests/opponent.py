"""An opponent of TicTacToe: a random one of the moves that the game names."""

import random
import re


def act(messages: str, seed: int) -> str:
    moves = re.findall(r"'(\[\d\])'", messages.rpartition("Available Moves:")[2])
    return random.Random(seed).choice(moves)
