"""Games of the real package: alone, against an opponent, by seed, and what is refused."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from rlhf.errors import ConfigError, EnvError
from rlhf.seeds import derive_seed
from rlhf.types import EnvStep, Row
from rlhf_plugin_textarena import TextArena

FILE = f"file:{Path(__file__).parent / 'opponent.py'}"


def begun(seed: int = 0, columns=None, **config) -> tuple[TextArena, str]:
    game = TextArena(TextArena.Config(**config))
    return game, game.reset(Row({"prompt": "", **(columns or {})}, "unit", 4), seed)


def play(*actions: str, **config) -> tuple[str, list[EnvStep]]:
    game, opening = begun(**config)
    return opening, [game.step(action) for action in actions]


def bisect(**config) -> EnvStep:
    """Guess the number by bisection, to the end."""
    game, _ = begun(id="GuessTheNumber-v0", **config)
    low, high = 1, 20
    while True:
        middle = (low + high) // 2
        step = game.step(f"I guess [{middle}].")
        if step.done:
            return step
        low, high = (middle + 1, high) if "higher" in step.observation else (low, middle - 1)


def test_a_game_alone_tells_each_message_once_and_gives_its_reward_at_the_end() -> None:
    opening, (first, second) = play("[20]", "1", id="GuessTheNumber-v0", seed=3)
    assert opening.startswith("[GAME] You are Player 0. You are playing Guess The Number.")
    assert first == EnvStep("[GAME] The target number is lower.")
    assert second == EnvStep("[GAME] The target number is higher.")
    end = bisect(seed=3)
    assert (end.reward, end.done, end.info["invalid_move"]) == (1.0, True, False)
    assert "correct number" in end.info["reason"]


def test_an_invalid_move_is_told_and_a_second_one_loses_by_the_games_rule() -> None:
    _, (refusal, lost) = play("no idea", "none", id="GuessTheNumber-v0")
    assert "You attempted an invalid move" in refusal.observation
    assert (refusal.reward, refusal.done) == (0.0, False)
    assert (lost.done, lost.info["invalid_move"]) == (True, True)


def test_the_seed_starts_the_game_and_a_row_may_choose_its_own() -> None:
    def board(sample: int, **columns) -> str:
        return begun(sample, columns, id="2048-v0")[1]

    assert len({board(2**62 + n) for n in range(5)}) > 1
    assert board(1, seed=9) == board(2, seed=9) == board(9)
    with pytest.raises(EnvError, match="row 4 of source 'unit' has the seed str '9'; allowed: a whole number from 0"):
        board(1, seed="9")


def test_a_game_leaves_the_global_random_numbers_alone() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    play("up", "left", id="2048-v0")
    assert random.random() == expected


def move(messages: str) -> str:
    return re.findall(r"'(\[\d\])'", messages.rpartition("Available Moves:")[2])[0]


def test_an_opponent_plays_the_other_seat_and_the_winner_gets_1() -> None:
    rewards, seats = set(), set()
    for seed in range(30):
        game, observation = begun(seed, id="TicTacToe-v0", opponent=FILE)
        seats.add(observation.partition(" in Tic")[0])
        moves = len(re.findall("'", observation)) // 2
        step = EnvStep(observation)
        while not step.done:
            step = game.step(move(step.observation))
        assert step.info["reason"]
        assert moves > 0
        rewards.add(step.reward)
    assert seats == {"[GAME] You are Player 0", "[GAME] You are Player 1"}
    assert {1.0, -1.0} <= rewards <= {1.0, 0.0, -1.0}


def test_in_self_play_each_player_reads_what_it_may_know_and_gets_its_reward() -> None:
    """Kuhn poker: each player is told its own card, and what the other one did."""
    game, step = begun(5, id="KuhnPoker-v0", opponent="self")
    assert game.agents(game.config) == ("player0", "player1")
    cards = {}
    while not step.done:
        agent, observation = step.agent, step.observation
        if agent not in cards:
            assert f"You are Player {agent[-1]}" in observation
            (cards[agent],) = {*re.findall(r"card is: '(.)'", observation)}
        step = game.step("[check]")
    assert len({*cards.values()}) == 2
    assert "[Player 0] [check]" in observation or "[Player 1] [check]" in observation
    assert sorted(step.rewards) == ["player0", "player1"]
    assert sum(step.rewards.values()) == 0
    assert step.info["reason"]


def test_a_failing_opponent_is_a_failed_sample(tmp_path) -> None:
    (tmp_path / "broken.py").write_text("def act(messages, seed):\n    return None\n")
    config = {"id": "TicTacToe-v0", "opponent": f"file:{tmp_path}/broken.py"}
    first = next(seed for seed in range(99) if derive_seed(seed, "seat") % 2 == 0)
    with pytest.raises(EnvError, match=r"act\(\) of the opponent 'file:.*' returned NoneType None; allowed: text"):
        play("[4]", seed=first, **config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "TicTacTo-v0"}, "TextArena has no game 'TicTacTo-v0'. Did you mean 'TicTacToe-v0'"),
        ({"id": "TicTacToe-v0"}, "'TicTacToe-v0' is a game for several players. .* opponent = 'file:opponent.py'"),
        ({"id": "QuantumTicTacToe-v0"}, "is a game for several players"),
        ({"id": "SecretMafia-v0"}, "'SecretMafia-v0' is a game for several players"),
        ({"id": "SecretMafia-v0", "opponent": FILE}, "'SecretMafia-v0' cannot be played by two"),
        ({"id": "Sudoku-v0", "opponent": FILE}, "'Sudoku-v0' cannot be played by two .* Remove 'opponent'"),
        ({"id": "Debate-v0"}, "ValueError: OpenRouter API key not found"),
        ({"id": "GuessTheNumber-v0", "kwargs": {"foo": 1}}, "unexpected keyword argument 'foo'"),
        ({"id": "TicTacToe-v0", "opponent": "random"}, "opponent = 'random'; allowed: 'self', or file:PATH"),
        ({"id": "Sudoku-v0", "opponent": "self"}, "'Sudoku-v0' cannot be played by two .* Remove 'opponent'"),
        ({"id": "TicTacToe-v0", "opponent": f"file:{__file__}"}, "defines no function act"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_run(config, message, monkeypatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises((ValidationError, ConfigError), match=message):
        TextArena.Config(**config)


def test_a_missing_file_of_an_opponent_is_refused() -> None:
    with pytest.raises((ValidationError, ConfigError), match="cannot be read: No such file"):
        TextArena.Config(id="TicTacToe-v0", opponent="file:nothing.py")
