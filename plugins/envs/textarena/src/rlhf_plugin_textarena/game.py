"""One game of TextArena: its messages since the last turn, and its random numbers kept apart."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import textarena
from textarena.core import GAME_ID, ObservationType


class Game:
    """A game with its own state of the random generators, which TextArena's games draw from as globals.

    Raises whatever the game raises when it is made or reset, AssertionError for a wrong number of players.
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
        """Without wrappers: it gives each message once. The wrappers' observations repeat the whole game at every turn,
        which a conversation already contains."""

    @property
    def state(self) -> Any:
        return self._inner.state

    @property
    def player(self) -> int:
        """The player whose turn it is."""
        number: int = self.state.current_player_id
        return number

    def messages(self) -> str:
        """What the player whose turn it is has not seen yet, without its own actions."""
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

        before = random.getstate(), np.random.get_state()
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        try:
            yield
        finally:
            self._random = random.getstate(), np.random.get_state()
            random.setstate(before[0])
            np.random.set_state(before[1])
