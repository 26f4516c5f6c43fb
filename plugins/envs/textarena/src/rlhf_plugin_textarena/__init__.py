"""Environment: the games of TextArena, alone, against an opponent from a file, or against itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import textarena
from pydantic import Field, model_validator
from rlhf import hookimpl
from rlhf.errors import EnvError, PluginError, brief, did_you_mean
from rlhf.interfaces import ComponentConfig, Env
from rlhf.plugins.files import SourceFile
from rlhf.seeds import derive_seed
from rlhf.types import EnvStep, Row
from textarena import SinglePlayerState
from textarena.core import GAME_ID, ObservationType
from textarena.envs.registration import ENV_REGISTRY

MOST_SEED = 2**32 - 1
"""Largest seed of NumPy's global generator, which some games use."""
FILE = "file:"
SELF = "self"
SEATS = ("player0", "player1")
"""The agents of self-play."""
Opponent = Callable[[str, int], str]


class TextArenaConfig(ComponentConfig):
    """The game and the opponent."""

    id: str
    """Name of the game, such as ``GuessTheNumber-v0``."""
    kwargs: Mapping[str, Any] = Field(default_factory=dict)
    """Options of the game, such as ``{ max_number = 50 }``."""
    opponent: str | None = None
    """For games of two players: ``file:opponent.py``, a Python file with a function ``act(messages, seed)`` that
    returns the other player's action. ``messages`` are those that this player has not seen yet; ``seed`` differs from
    turn to turn. ``self``: the policy plays both seats, and learns from both."""

    @model_validator(mode="after")
    def _can_be_played(self) -> TextArenaConfig:
        try:
            kwargs = json.dumps(self.kwargs, sort_keys=True)
        except TypeError as error:
            raise ValueError(f"kwargs must hold numbers, text, lists and tables: {error}") from None
        if self.opponent not in (None, SELF):
            try:
                opponent_of(str(self.opponent))
            except PluginError as error:
                raise ValueError(f"opponent: {error}") from error
        _check(self.id, kwargs, 1 if self.opponent is None else 2)
        return self


class TextArena(Env):
    """The opening is the game's message to the policy before its first turn. Observations are the game's messages after
    its turns.

    The sample's seed starts the game and, in games of two, chooses the policy's seat. A row's column ``seed`` (a whole
    number from 0 to 2**32 - 1) takes precedence. All samples of a group play the same game. The reward is the game's
    own reward at its end. ``info`` says why the game ended (``reason``), and whether the policy lost by an invalid
    move.

    With ``opponent = "self"`` the policy plays both seats, as the agents ``player0`` and ``player1``. Each reads its
    own messages of the game, and gets its own reward at the end.
    """

    name = "textarena"
    source = "https://github.com/LeonGuertler/TextArena"
    Config = TextArenaConfig
    conformance = {"configs": (TextArenaConfig.model_construct(id="GuessTheNumber-v0"),)}  # built without validation

    @classmethod
    def agents(cls, config: TextArenaConfig) -> tuple[str, ...]:
        return SEATS if config.opponent == SELF else ()

    def reset(self, row: Row, seed: int) -> str | EnvStep:
        c, row_seed = self.config, row.get("seed")
        if row_seed is not None and (type(row_seed) is not int or not 0 <= row_seed <= MOST_SEED):
            raise EnvError(
                f"row {row.index} of source {row.source!r} has the seed {brief(row_seed)}; allowed: a whole number "
                f"from 0 to {MOST_SEED}"
            )
        self._seed = seed % (MOST_SEED + 1) if row_seed is None else row_seed
        self._opponent = None if c.opponent in (None, SELF) else opponent_of(str(c.opponent))
        self._game = Game(c.id, c.kwargs, 1 if c.opponent is None else 2, self._seed)
        if c.opponent == SELF:
            return self._next()
        self._seat = 0 if self._opponent is None else derive_seed(self._seed, "seat") % 2
        self._turn = 0
        if self._opponents_turns():
            raise EnvError(f"{c.id} ended before the policy's first turn: the opponent lost by an invalid move")
        return self._game.messages()

    def step(self, action: str) -> EnvStep:
        if self.config.opponent == SELF:
            return self._end_step(range(len(SEATS))) if self._game.act(action) else self._next()
        done = self._game.act(action) or self._opponents_turns()
        if not done:
            return EnvStep(self._game.messages())
        step = self._end_step([self._seat])
        return replace(step, reward=step.rewards[SEATS[self._seat]], rewards={})

    def _next(self) -> EnvStep:
        """The observation for the player whose turn it is, in self-play."""
        return EnvStep(self._game.messages(), agent=SEATS[self._game.player])

    def _end_step(self, seats: Sequence[int]) -> EnvStep:
        """The end of the game, with the rewards of these players."""
        rewards, facts = self._game.outcome()
        player_facts = [facts.get(seat, {}) for seat in seats]
        reason = next((str(fact["reason"]) for fact in player_facts if fact.get("reason")), "")
        info = {"reason": reason, "invalid_move": any(fact.get("invalid_move", False) for fact in player_facts)}
        for seat in seats:
            if rewards is None or rewards.get(seat) is None:
                raise EnvError(f"{self.config.id} ended without a reward for player {seat}: {reason}")
        return EnvStep(done=True, info=info, rewards={SEATS[s]: float((rewards or {})[s]) for s in seats})

    def _opponents_turns(self) -> bool:
        """The opponent's turns until it is the policy's. Returns whether the game is over."""
        while self._opponent is not None and self._game.player != self._seat:
            action = self._opponent(self._game.messages(), derive_seed(self._seed, "opponent", self._turn))
            self._turn += 1
            if not isinstance(action, str):
                raise EnvError(
                    f"act() of the opponent {self.config.opponent!r} returned {brief(action)}; allowed: text"
                )
            if self._game.act(action):
                return True
        return False


def opponent_of(reference: str) -> Opponent:
    """The function ``act`` of the file. Raises PluginError or ConfigError if the file does not define it."""
    if not reference.startswith(FILE):
        raise ValueError(
            f"opponent = {reference!r}; allowed: {SELF!r}, or {FILE}PATH, a Python file with act(messages, seed)"
        )
    path = reference.removeprefix(FILE)
    act = getattr(SourceFile.read(path).load(), "act", None)
    if not callable(act):
        raise ValueError(f"opponent: {path} defines no function act(messages, seed)")
    function: Opponent = act
    return function


@cache
def _check(id: str, kwargs_text: str, players: int) -> None:
    """Raises ValueError if the game does not exist, cannot start here, or is for another number of players."""
    if id not in ENV_REGISTRY:
        raise ValueError(f"TextArena has no game {id!r}.{did_you_mean(id, ENV_REGISTRY)} It has {len(ENV_REGISTRY)}")
    try:
        game = Game(id, json.loads(kwargs_text), players, 0)
        game.messages()
    except Exception as error:
        raise ValueError(_cause(id, players, error)) from error
    if players == 1 and not isinstance(game.state, SinglePlayerState):
        raise ValueError(_refusal(id))


def _cause(id: str, players: int, error: Exception) -> str:
    if isinstance(error, AssertionError) and "player" in str(error).lower():  # TextArena's only check of the number
        return _refusal(id) if players == 1 else f"{id!r} cannot be played by two players ({error}). Remove 'opponent'"
    if isinstance(error, LookupError) and "NLTK" in str(error):
        return f"{id!r} needs word lists of NLTK: python -m nltk.downloader words averaged_perceptron_tagger_eng"
    if isinstance(error, SyntaxError):
        return f"{id!r} cannot be imported: its code needs Python 3.12 or newer ({error})"
    return f"{id!r} cannot start: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _refusal(id: str) -> str:
    return (
        f"{id!r} is a game for several players. Games for two players need opponent = 'file:opponent.py', or 'self' "
        "for self-play; games for more players are not supported"
    )


class Game:
    """A game with its own random state, because TextArena's games use the global random generators.

    Raises whatever the game raises when it is created or reset; AssertionError for a wrong number of players.
    """

    def __init__(self, id: str, kwargs: Mapping[str, Any], players: int, seed: int) -> None:
        import numpy as np

        self._random: tuple[Any, Any] = (random.Random(seed).getstate(), np.random.RandomState(seed).get_state())
        with self._own_random():
            self._game = textarena.make(id, **kwargs)
            self._game.reset(num_players=players, seed=seed)
        inner = self._game
        while isinstance(inner, textarena.Wrapper):
            inner = inner.env
        self._inner = inner
        """The game without wrappers, which returns each message once. The wrappers' observations repeat the whole game
        at every turn, although a conversation already contains it."""

    @property
    def state(self) -> Any:
        return self._inner.state

    @property
    def player(self) -> int:
        """The player whose turn it is."""
        number: int = self.state.current_player_id
        return number

    def messages(self) -> str:
        """The new messages for the player whose turn it is, without its own actions."""
        with self._own_random():
            player, messages = self._inner.get_observation()
        names = {GAME_ID: "GAME", **(self.state.role_mapping or {})}
        lines = [
            f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, kind in messages
            if not (kind == ObservationType.PLAYER_ACTION and sender == player)
        ]
        return "\n".join(lines)

    def act(self, action: str) -> bool:
        """The turn of :attr:`player`. Returns whether the game is over."""
        with self._own_random():
            # with the wrappers, which convert the action; only observations come from the inner game
            done, _ = self._game.step(action)
        return bool(done)

    def outcome(self) -> tuple[Mapping[int, float] | None, Mapping[int, Mapping[str, Any]]]:
        """(rewards of the players, facts about them)."""
        with self._own_random():
            rewards, facts = self._inner.close()
        return rewards, facts or {}

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        import numpy as np

        caller_states = random.getstate(), np.random.get_state()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        try:
            yield
        finally:
            self._random = random.getstate(), np.random.get_state()
            random.setstate(caller_states[0])
            np.random.set_state(caller_states[1])


@hookimpl
def rlhf_register_env() -> list[type]:
    return [TextArena]
