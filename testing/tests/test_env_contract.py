"""The environment suite passes well-made environments and names the rule that a broken one breaks."""

from __future__ import annotations

import os
import random
import subprocess
import threading

import pytest
from rlhf.interfaces import Env
from rlhf.types import EnvStep
from rlhf_testing.contract import Nonconformance
from rlhf_testing.env import EnvContract


class Echo(Env):
    """The complete example of the interface."""

    name = "echo"

    async def reset(self, row, seed):
        return "Say 'yes'."

    async def step(self, action):
        return EnvStep(reward=float(action == "yes"), done=True)


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


class Bidding(Env):
    """The example of several agents."""

    name = "bidding"

    @classmethod
    def agents(cls, config):
        return ("first", "second")

    async def reset(self, row, seed):
        self.bid = None
        return EnvStep("Bid.", agent="first")

    async def step(self, action):
        if self.bid is None:
            self.bid = len(action)
            return EnvStep("Bid more.", agent="second")
        won = 1.0 if len(action) > self.bid else -1.0
        return EnvStep(done=True, rewards={"first": -won, "second": won})


class TestBidding(EnvContract):
    env = Bidding
    registered = False


# ------------------------------------------------------------------------------- broken on purpose


class BeginsWithText(Bidding):
    """Does not say who begins."""

    async def reset(self, row, seed):
        self.bid = None
        return "Bid."


class NamesAStranger(Bidding):
    """Rewards an agent that it did not name."""

    async def step(self, action):
        return EnvStep(done=True, rewards={"third": 1.0})


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


class ScoreAsText(Echo):
    """The score is not a number."""

    async def step(self, action):
        return EnvStep(score="0.5", done=True)


class ImageOfPath(Echo):
    """The name of an image file."""

    async def step(self, action):
        return EnvStep(images=("board.png",), done=True)


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


class ForgetsFile(Echo):
    """A file of its own, and no close()."""

    async def reset(self, row, seed):
        self.log = open(os.devnull, "w")  # noqa: SIM115
        return ""


class ForgetsProcess(Dice):
    """A calculator process that is not ended."""

    def reset(self, row, seed):
        self.calculator = subprocess.Popen(["sleep", "60"])
        Started.append(self.calculator)
        return super().reset(row, seed)


class ForgetsToWait(ForgetsProcess):
    """It ends the process, and leaves it behind as a zombie."""

    def close(self):
        if hasattr(self, "calculator"):
            self.calculator.kill()
            os.waitid(os.P_PID, self.calculator.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie


class ForgetsThread(Dice):
    """A thread that waits for good, opened by the first step only."""

    def step(self, action):
        if not hasattr(self, "thread"):
            self.thread = threading.Thread(target=Released.wait, args=(60,), name="ticker", daemon=True)
            self.thread.start()
        return super().step(action)


Started: list[subprocess.Popen] = []
Released = threading.Event()


class Holds(Dice):
    """Releases all three."""

    shared: list = []
    """A resource that the first episode opens for all episodes: kept on purpose."""

    def reset(self, row, seed):
        if not self.shared:
            self.shared.append(open(os.devnull))  # noqa: SIM115
        self.over = threading.Event()
        self.log = open(os.devnull, "w")  # noqa: SIM115
        self.process = subprocess.Popen(["sleep", "60"])
        self.thread = threading.Thread(target=self.over.wait, args=(60,))
        self.thread.start()
        return super().reset(row, seed)

    def close(self):
        if hasattr(self, "log"):
            self.log.close()
            self.process.kill()
            self.process.wait()
            self.over.set()
            self.thread.join()


class TestHolds(EnvContract):
    env = Holds
    registered = False


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (ForgetsFile, "always leaves .*open files: /dev/null"),
        (ForgetsProcess, "child processes: sleep"),
        (ForgetsToWait, r"child processes: .* \(ended, not waited for\)"),
        (ForgetsThread, "played to its end always leaves .*threads: ticker"),
    ],
)
@pytest.mark.linux("elsewhere child processes are not listed")
def test_resources_that_an_episode_does_not_release_are_named(cls, message):
    Released.clear()
    try:
        with pytest.raises(Nonconformance, match=message):
            suite(cls).test_gives_everything_back()
    finally:
        Released.set()
        for process in Started:
            process.kill()
            process.wait()
        Started.clear()


def suite(cls, **attributes):
    return type("Broken", (EnvContract,), {"env": cls, "registered": False, **attributes})()


@pytest.mark.parametrize(
    ("cls", "check", "message"),
    [
        (IgnoresSeed, "test_replay", "two episodes with equal actions differ"),
        (SharesState, "test_replay", "another episode open at the same time"),
        (NaNReward, "test_episodes", "the reward is nan"),
        (ScoreAsText, "test_episodes", "the score is '0.5'"),
        (ImageOfPath, "test_episodes", r"images are \('board.png',\); allowed is a tuple of bytes"),
        (Tuple, "test_episodes", "must be an EnvStep"),
        (BeginsWithText, "test_episodes", r"reset\(\) must return EnvStep\(observation, agent=...\), got 'Bid.'"),
        (NamesAStranger, "test_episodes", r"names the agent \['third'\]; agents\(\) gives \('first', 'second'\)"),
        (EditsRow, "test_episodes", "changed its data row"),
        (Mixed, "test_methods", "mixes async and plain"),
        (CloseNeedsReset, "test_closes_early", "without reset"),
    ],
)
def test_broken_env_fails_the_right_check(cls, check, message):
    with pytest.raises(Nonconformance, match=message):
        getattr(suite(cls), check)()


def test_good_env_close_is_reported():
    suite(Dice).test_closes_early()
