"""Episodes of the real package: what is shown, how actions are read, how episodes end, and what is refused."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pydantic import ValidationError
from rlhf.errors import EnvError
from rlhf.types import EnvStep, Row
from rlhf_plugin_gymnasium import GymnasiumEnv, as_text, cannot_be_text, plain

WAYS = ("left", "down", "right", "up")
LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": WAYS}


def play(*actions: str, seed: int = 0, columns=None, **config) -> tuple[str, list[EnvStep]]:
    game = GymnasiumEnv(GymnasiumEnv.Config(**config))
    opening = game.reset(Row({"prompt": "", **(columns or {})}, "unit", 4), seed)
    steps = [game.step(action) for action in actions]
    game.close()
    return opening, steps


def test_an_episode_is_shown_as_the_environment_draws_it() -> None:
    opening, steps = play("Right ", "1", "down", "down", "right", "down", "right", **LAKE)
    assert opening == "Actions: left, down, right, up\n[red:S]FFF\nFHFH\nFFFH\nHFFG"
    assert steps[0].observation == "  (Right)\nS[red:F]FF\nFHFH\nFFFH\nHFFG"
    assert steps[1] == EnvStep(
        "  (Down)\nSFFF\nF[red:H]FH\nFFFH\nHFFG",
        0.0,
        True,
        info={"valid": True, "terminated": True, "truncated": False},
    )


def test_the_goal_gives_the_environments_reward() -> None:
    _, steps = play("down", "down", "right", "down", "right", "right", **LAKE)
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0]
    assert [step.done for step in steps] == [False] * 5 + [True]


def test_the_environments_own_limit_of_steps_truncates() -> None:
    limited = {**LAKE, "kwargs": {"is_slippery": False, "max_episode_steps": 2}}
    _, steps = play("up", "up", **limited)
    assert (steps[0].done, steps[1].done) == (False, True)
    assert steps[1].info == {"valid": True, "terminated": False, "truncated": True}


def test_values_in_place_of_the_drawing() -> None:
    opening, (step,) = play("2", **LAKE, view="values")
    assert (opening, step.observation) == ("Actions: left, down, right, up\n0", "1")
    opening, (step, *_) = play("0", id="Blackjack-v1", seed=1)
    assert opening.startswith("Actions: 0, 1\n(")
    assert step.done


def test_one_seed_is_one_episode_and_a_row_may_choose_its_own() -> None:
    def values(sample: int, **columns) -> str:
        return play(id="CartPole-v1", seed=sample, columns=columns)[0]

    assert values(2**62) == values(2**62) != values(2**62 + 1)
    assert values(1, seed=9) == values(2, seed=9) == values(9)
    with pytest.raises(EnvError, match="row 4 of source 'unit' has the seed int -1; allowed: a whole number from 0"):
        values(1, seed=-1)


@pytest.mark.parametrize("action", ["", "east", "4", "right!", "right down", "-1", "\N{SUPERSCRIPT ONE}"])
def test_an_invalid_action_is_told_or_ends_the_episode(action) -> None:
    _, (refusal, moved) = play(action, "right", **LAKE, invalid_reward=-0.5)
    assert refusal == EnvStep(
        "That is not an action. Write one of them, and nothing else. Actions: left, down, right, up",
        -0.5,
        info={"valid": False},
    )
    assert "S[red:F]FF" in moved.observation
    _, (step,) = play(action, **LAKE, on_invalid="end")
    assert (step.done, step.reward) == (True, 0.0)


def test_the_action_in_a_tag() -> None:
    _, steps = play("I go <answer>up</answer>, no: <answer> right </answer>.", "right", **LAKE, answer="tag")
    assert "S[red:F]FF" in steps[0].observation
    assert steps[1].info == {"valid": False}


def test_tags_without_an_end_are_searched_in_linear_time() -> None:
    """In quadratic time the second turn would take minutes."""
    _, steps = play(
        "<answer>" * 99 + "</answer>", "<answer>right</answer>" + "<answer>" * 100_000, **LAKE, answer="tag"
    )
    assert [step.info["valid"] for step in steps] == [False, True]


def test_colours_become_names() -> None:
    opening, _ = play(id="Taxi-v4", seed=2**62)
    assert "|[magenta:R]: | : :[blue:G]|" in opening
    assert "[yellow: ]" in opening
    assert plain("\x1b[1mbold\x1b[0m \x1b[2J\n") == "bold "


def test_observations_of_every_kind() -> None:
    space = spaces.Dict(
        at=spaces.Box(-9, 9, (2,), np.float32), grid=spaces.MultiDiscrete([[3, 3]]), said=spaces.Text(9),
        both=spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))), pixels=spaces.Box(0, 255, (2,), np.uint8),
    )  # fmt: skip
    value = {
        "at": np.array([0.123456, -9]), "grid": np.array([[1, 2]]), "said": "hello", "both": (2, np.array([0, 1])),
        "pixels": np.array([7, 255], np.uint8),
    }  # fmt: skip
    assert cannot_be_text(space) == ""
    assert set(as_text(space, value).split("\n")) == {
        "at: [0.1235, -9]", "grid: [[1, 2]]", "said: hello", "both: (2, [0, 1])", "pixels: [7, 255]",
    }  # fmt: skip


class Wide(gymnasium.Env):
    observation_space = spaces.Box(0, 255, (8, 9), np.uint8)
    action_space = spaces.Discrete(2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "Pendulum-v1"}, r"has actions Box\(-2.0, 2.0, .*continuous and combined ones are not supported"),
        ({"id": "FrozenLake-v9"}, "gymnasium cannot make 'FrozenLake-v9': VersionNotFound"),
        ({"id": "Taxi-v3"}, "Please use `Taxi-v4` instead"),
        ({"id": "LunarLander-v3"}, r'DependencyNotInstalled: .*pip install "gymnasium\[box2d\]"'),
        ({"id": "no_such_module:Game-v0"}, "No module named 'no_such_module'"),
        ({"id": "FrozenLake-v1", "kwargs": {"foo": 1}}, "unexpected keyword argument 'foo'"),
        (
            {"id": "FrozenLake-v1", "kwargs": {"render_mode": "human"}},
            "'view' sets the render mode; remove it from kwargs",
        ),
        ({"id": "CartPole-v1", "view": "ansi"}, "does not draw text"),
        ({"id": "Wide-v0"}, "an array of 72 values is too long to write as text; at most 64"),
        ({"id": "FrozenLake-v1", "actions": ("a", "b")}, r"has 4 actions; got the names \['a', 'b'\]"),
        ({"id": "FrozenLake-v1", "actions": ("a", "b", "c", "A")}, "Give each action its own name"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_run(config, message) -> None:
    if "Wide-v0" not in gymnasium.registry:
        gymnasium.register("Wide-v0", Wide)
    with pytest.raises(ValidationError, match=message):
        GymnasiumEnv.Config(**config)
