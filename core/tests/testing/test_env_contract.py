"""The environment suite passes well-made environments and names the rule that a broken one breaks."""

from __future__ import annotations

import random

import pytest
from rlhf.interfaces import Env
from rlhf.testing.contract import Nonconformance
from rlhf.testing.env import EnvContract
from rlhf.types import EnvStep


class Echo(Env):
    """The complete example of the interface."""

    name = "echo"

    async def reset(self, row, seed):
        return "Say 'yes'."

    async def step(self, action):
        return EnvStep(reward=float(action == "yes"), done=True)


class TestEcho(EnvContract):
    env = Echo
    registered = False


class Dice(Env):
    """Plain methods, several turns, random by its seed."""

    name = "dice"

    def reset(self, row, seed):
        self.random = random.Random(seed)
        self.left = 3
        return f"{row['prompt']} {self.random.randint(1, 6)}"

    def step(self, action):
        self.left -= 1
        return EnvStep(str(self.random.randint(1, 6)), 0.5, self.left == 0)

    def close(self):
        return None


class TestDice(EnvContract):
    env = Dice
    registered = False
    rows = [{"prompt": "Roll."}, {"prompt": "Roll again."}]


# ------------------------------------------------------------------------------- broken on purpose


class IgnoresSeed(Dice):
    """Draws from the module's generator."""

    def step(self, action):
        self.left -= 1
        return EnvStep(str(random.randint(1, 10**6)), 0.5, self.left == 0)


class SharesState(Dice):
    """Keeps its turns in the class."""

    turns: list[int] = []

    def step(self, action):
        self.turns.append(1)
        self.left -= 1
        return EnvStep(str(len(self.turns)), 0.5, self.left == 0)

    def reset(self, row, seed):
        self.turns.clear()
        return super().reset(row, seed)


class NaNReward(Echo):
    """NaN."""

    async def step(self, action):
        return EnvStep(reward=float("nan"), done=True)


class Tuple(Echo):
    """Returns a tuple."""

    async def step(self, action):
        return "observation", 0.0, True


class EditsRow(Echo):
    """Writes into the data row."""

    async def reset(self, row, seed):
        row.columns["answer"] = "changed"
        return ""


class Mixed(Echo):
    """Async and plain methods."""

    def close(self):
        return None


class CloseNeedsReset(Dice):
    """close() reads what reset() made."""

    def close(self):
        self.random.seed(0)


def suite(made, **attributes):
    return type("Broken", (EnvContract,), {"env": made, "registered": False, **attributes})()


@pytest.mark.parametrize(
    ("made", "check", "message"),
    [
        (IgnoresSeed, "test_replay", "two episodes with equal actions differ"),
        (SharesState, "test_replay", "another episode open beside it"),
        (NaNReward, "test_episodes", "the reward is nan"),
        (Tuple, "test_episodes", "must be an EnvStep"),
        (EditsRow, "test_episodes", "changed its data row"),
        (Mixed, "test_methods", "mixes async and plain"),
        (CloseNeedsReset, "test_closes_early", "without reset"),
    ],
)
def test_broken_env_fails_the_right_check(made, check, message):
    with pytest.raises(Nonconformance, match=message):
        getattr(suite(made), check)()


def test_good_env_close_is_reported():
    suite(Dice).test_closes_early()
