"""The game, its replay by seed, and the best reward that any policy can reach."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path

import pytest
from pydantic import ValidationError
from rlhf.errors import EnvError
from rlhf.types import EnvStep, Row
from rlhf_plugin_number_game import NumberGame

README = Path(__file__).parents[1] / "README.md"


def row(**columns) -> Row:
    return Row(columns, "unit", 4)


def play(*actions: str, hidden: int | None = None, seed: int = 0, **config) -> tuple[str, list[EnvStep]]:
    async def episode():
        game = NumberGame(NumberGame.Config(**config))
        opening = await game.reset(row() if hidden is None else row(hidden=hidden), seed)
        return opening, [await game.step(a) for a in actions]

    return asyncio.run(episode())


async def bisect(game: NumberGame, hidden: int) -> tuple[float, int]:
    """Sum of rewards and number of questions of bisection."""
    low, high = game.config.low, game.config.high
    await game.reset(row(hidden=hidden), 0)
    total, questions = 0.0, 0
    while True:
        middle = (low + high) // 2
        step = await game.step(f"{middle}?")
        total, questions = total + step.reward, questions + 1
        if step.done:
            return total, questions
        low, high = (low, middle - 1) if step.observation == "<" else (middle + 1, high)


@cache
def fewest(n: int) -> int:
    """Minimum over all policies of the number of questions, summed over all n hidden numbers."""
    return 0 if n == 0 else n + min(fewest(k) + fewest(n - 1 - k) for k in range(n))


def test_answers_and_rewards() -> None:
    opening, steps = play("8?", "4", " 6 ?", "5?", hidden=5)
    assert opening == "1-15:"
    assert [s.observation for s in steps] == ["<", ">", "<", "="]
    assert [s.reward for s in steps] == pytest.approx([-0.1, -0.1, -0.1, 0.9])
    assert [s.done for s in steps] == [False, False, False, True]
    assert all(s.info["valid"] for s in steps)


@pytest.mark.parametrize("action", ["", "x", "0?", "16?", "5??", "-5?", "5 6", "9" * 400, "٥?"])
def test_an_invalid_action_is_answered_and_costs(action: str) -> None:
    _, (step,) = play(action, hidden=5)
    assert (step.observation, step.done, step.info["valid"]) == ("!", False, False)
    assert step.reward == pytest.approx(-0.3)


def test_an_action_of_white_space_costs_little() -> None:
    """The time must be linear: a pattern with two adjacent searches for white space would take minutes."""
    space = " " * 1_000_000
    assert [s.observation for s in play(f"5{space}x", f"{space}5{space}", f"5{space}?{space}", hidden=5)[1]] == list(
        "!=="
    )


def test_replay_by_seed() -> None:
    actions = [str(n) for n in range(1, 16)]
    assert play(*actions, seed=11) == play(*actions, seed=11)
    hidden = {next(i for i, s in enumerate(play(*actions, seed=seed)[1]) if s.done) for seed in range(200)}
    assert hidden == set(range(15))  # every number is hidden by some seed


def test_a_row_hides_its_own_number_and_a_wrong_one_is_refused() -> None:
    assert play("3", hidden=3, seed=1)[1][0].done
    with pytest.raises(EnvError, match=r"row 4 of source 'unit' hides 16 \(column 'hidden'\).*from 1 to 15"):
        play("3", hidden=16)
    with pytest.raises(EnvError, match=r"hides '3'"):
        play("3", hidden="3")


def test_the_range_can_be_left_to_the_prompt() -> None:
    assert play(hidden=3, show_range=False)[0] == ""


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValidationError, match="0 <= low <= high, got low = 9, high = 3"):
        NumberGame.Config(low=9, high=3)


@pytest.mark.parametrize("high", [3, 7, 15, 31, 63])
def test_bisection_is_the_best_policy_and_the_readme_says_what_it_reaches(high: int) -> None:
    async def all_of_them():
        game = NumberGame(NumberGame.Config(high=high))
        return [await bisect(game, hidden) for hidden in range(1, high + 1)]

    played = asyncio.run(all_of_them())
    questions = sum(q for _, q in played)
    reward = sum(r for r, _ in played) / high
    assert questions == fewest(high)
    assert reward == pytest.approx(1.0 - 0.1 * fewest(high) / high)
    assert f"| 1-{high} | {questions / high:.3f} | {max(q for _, q in played)} | {reward:.4f} |" in README.read_text()
