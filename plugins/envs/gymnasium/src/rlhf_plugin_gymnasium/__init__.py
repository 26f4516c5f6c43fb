"""Environment: environments of gymnasium with discrete actions, as text."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import gymnasium
from gymnasium import spaces
from pydantic import Field, model_validator
from rlhf import hookimpl
from rlhf.errors import EnvError, brief
from rlhf.interfaces import ComponentConfig, Env
from rlhf.types import EnvStep, Row

TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class GymnasiumConfig(ComponentConfig):
    """The environment, how it is shown, and how actions are read."""

    id: str
    """Name of the environment, such as ``FrozenLake-v1``; ``module:Name-v0`` imports ``module`` first."""
    kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of ``gymnasium.make``, such as ``{ is_slippery = false }`` or ``{ max_episode_steps = 20 }``."""
    view: Literal["auto", "ansi", "values"] = "auto"
    """``ansi``: the text that the environment draws for a terminal. ``values``: the observation's numbers. ``auto``:
    ``ansi`` if the environment offers it."""
    actions: tuple[str, ...] = ()
    """Names of the actions, in the order of their numbers. Absent: the policy writes numbers."""
    answer: Literal["text", "tag"] = "text"
    """``text``: the whole turn is the action. ``tag``: the action is the text in the last ``<answer>...</answer>``."""
    on_invalid: Literal["tell", "end"] = "tell"
    """What happens after a turn that is not an action. ``tell``: the policy gets a message, and the environment does
    not advance. ``end``: the episode ends."""
    invalid_reward: float = 0.0
    """Reward of a turn that is not an action."""

    @model_validator(mode="after")
    def _can_be_played(self) -> GymnasiumConfig:
        try:
            kwargs = json.dumps(self.kwargs, sort_keys=True)
        except TypeError as error:
            raise ValueError(f"kwargs must hold numbers, text, lists and tables: {error}") from None
        actions, _ = inspect(self.id, kwargs, self.view)
        names = {name.casefold() for name in self.actions}
        if self.actions and (len(self.actions) != actions or len(names) != actions or "" in names):
            raise ValueError(
                f"{self.id} has {actions} actions; got the names {list(self.actions)}. Give each action its own name"
            )
        return self


class GymnasiumEnv(Env):
    """One episode of an environment with a ``Discrete`` action space. The opening names the actions and shows the first
    observation. Rewards are the environment's own.

    The sample's seed resets the environment, so all samples of a group begin in the same state. A row's column ``seed``
    (a whole number from 0) takes precedence. ``info`` of a step contains ``valid``, ``terminated`` (the environment
    reached an end) and ``truncated`` (its step limit ended it). Both ends set ``done``.
    """

    name = "gymnasium"
    source = "https://gymnasium.farama.org"
    Config = GymnasiumConfig
    conformance = {"configs": (GymnasiumConfig.model_construct(id="FrozenLake-v1"),)}  # built without validation
    _env: gymnasium.Env[Any, Any] | None = None

    def reset(self, row: Row, seed: int) -> str:
        row_seed = row.get("seed")
        if row_seed is not None and (type(row_seed) is not int or row_seed < 0):
            raise EnvError(
                f"row {row.index} of source {row.source!r} has the seed {brief(row_seed)}; allowed: "
                "a whole number from 0"
            )
        c = self.config
        _, draws = inspect(c.id, json.dumps(c.kwargs, sort_keys=True), c.view)
        kwargs = {**c.kwargs, "render_mode": "ansi"} if draws else c.kwargs
        self._env = gymnasium.make(c.id, **kwargs)
        observation, _ = self._env.reset(seed=seed if row_seed is None else row_seed)
        first = int(self._space.start)
        numbers = [str(first + n) for n in range(int(self._space.n))]
        names = list(c.actions) or numbers
        # names replace numbers, because an action may have the number of another one as its name
        self._numbers_by_name = {n: int(n) for n in numbers} | {n.casefold(): first + i for i, n in enumerate(names)}
        self._allowed = f"Actions: {', '.join(names)}"
        return f"{self._allowed}\n{self._text(observation)}"

    def step(self, action: str) -> EnvStep:
        assert self._env is not None
        answer: str | None = action
        if self.config.answer == "tag":
            closed = "".join(action.rpartition("</answer>")[:2])  # unclosed tags would take quadratic time
            answer = next(reversed(TAG.findall(closed)), None)
        number = self._numbers_by_name.get(answer.strip().casefold()) if answer is not None else None
        if number is None:
            form = " between <answer> and </answer>" if self.config.answer == "tag" else ""
            message = f"That is not an action. Write one of them{form}, and nothing else. {self._allowed}"
            return EnvStep(message, self.config.invalid_reward, self.config.on_invalid == "end", info={"valid": False})
        observation, reward, terminated, truncated, _ = self._env.step(number)
        ends = {"terminated": bool(terminated), "truncated": bool(truncated)}
        return EnvStep(self._text(observation), float(reward), any(ends.values()), info={"valid": True, **ends})

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    @property
    def _space(self) -> spaces.Discrete:
        assert self._env is not None
        space = self._env.action_space
        assert isinstance(space, spaces.Discrete)
        return space

    def _text(self, observation: Any) -> str:
        assert self._env is not None
        if self._env.render_mode == "ansi":
            picture: Any = self._env.render()
            return plain(picture)
        return as_text(self._env.observation_space, observation)


@cache
def inspect(id: str, kwargs_text: str, view: str) -> tuple[int, bool]:
    """(number of actions, whether the environment draws text). Raises ValueError if it cannot be played as text."""
    kwargs = json.loads(kwargs_text)
    if "render_mode" in kwargs:
        raise ValueError("kwargs.render_mode: the option 'view' sets the render mode; remove it from kwargs")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an old version: the error says so
            env = gymnasium.make(id, **kwargs)
    except Exception as error:  # gymnasium's message says what to install
        raise ValueError(f"gymnasium cannot make {id!r}: {type(error).__name__}: {error}") from error
    try:
        if not isinstance(env.action_space, spaces.Discrete):
            raise ValueError(
                f"{id!r} has actions {env.action_space}. Only actions of a Discrete space have a number or a name; "
                "continuous and combined ones are not supported"
            )
        offered = "ansi" in (env.metadata.get("render_modes") or ())
        if view == "ansi" and not offered:
            raise ValueError(f"{id!r} does not draw text (view = 'ansi'); set view = 'values'")
        draws = offered and view != "values"
        if not draws and (reason := cannot_be_text(env.observation_space)):
            raise ValueError(f"{id!r} has observations {env.observation_space}: {reason}")
        return int(env.action_space.n), draws
    finally:
        env.close()


LARGEST = 64
"""Largest number of values of an array that is written as text."""
COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
COLOURED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)
OTHER_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def cannot_be_text(space: gymnasium.Space[Any]) -> str:
    """Why observations of ``space`` cannot be written as text; empty if they can."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.values() if isinstance(space, spaces.Dict) else space
        return next(filter(None, map(cannot_be_text, parts)), "")
    if isinstance(space, spaces.Discrete | spaces.Text):
        return ""
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        size = math.prod(space.shape)
        return (
            ""
            if size <= LARGEST
            else f"an array of {size} values is too long to write as text; at most {LARGEST} are allowed"
        )
    return f"{type(space).__name__} spaces are not written as text"


def as_text(space: gymnasium.Space[Any], value: Any) -> str:
    """``value`` of ``space``: numbers with at most 4 digits, arrays in brackets, one line for each key of a table."""
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{key}: {as_text(part, value[key])}" for key, part in space.items())
    if isinstance(space, spaces.Tuple):
        return "(" + ", ".join(as_text(part, item) for part, item in zip(space, value, strict=True)) + ")"
    if isinstance(space, spaces.Text):
        return str(value)
    return _numbers(value.tolist() if hasattr(value, "tolist") else value)


def plain(rendered: str) -> str:
    """Terminal output without escape codes. A coloured character becomes ``[red:S]``, because the colour marks the
    player's position."""
    text = COLOURED.sub(lambda match: _coloured_text(match[1], match[2]), rendered)
    return OTHER_CODES.sub("", text).strip("\n")


def _coloured_text(codes: str, text: str) -> str:
    for code in map(int, filter(None, codes.split(";"))):
        if code // 10 in (3, 4, 9, 10) and code % 10 < 8:
            return f"[{COLOURS[code % 10]}:{text}]"
    return text


def _numbers(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_numbers, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(int(value))


@hookimpl
def rlhf_register_env() -> list[type]:
    return [GymnasiumEnv]
