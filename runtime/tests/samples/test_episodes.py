"""Environments: deadlines, a worker for each open episode, one close, and failures that fail only their own sample."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from rlhf.errors import EnvError, PluginInvalid
from rlhf.interfaces import Env
from rlhf.plugins import Resolved
from rlhf.types import EnvStep, Row, Sampling
from rlhf_runtime.config.sections import EnvSection
from rlhf_runtime.samples.episodes import Episodes


def row(**columns) -> Row:
    return Row(columns, "unit", 0)


def section(**options) -> EnvSection:
    return EnvSection(use="x", **options)


class Counter(Env):
    """Counts its calls; the action says how the step fails."""

    name = "counter"
    closed = 0

    async def reset(self, row, seed):
        Counter.closed = 0
        self.start = row["start"] + seed
        if self.start < 0:
            raise ValueError("negative start")
        return f"start {self.start}"

    async def step(self, action):
        if action == "raise":
            raise ValueError("bad action")
        if action == "hang":
            await asyncio.sleep(600)
        if action == "none":
            return None
        if action == "nan":
            return EnvStep(reward=float("nan"))
        if action == "huge":
            return EnvStep(reward=10**1000)
        if action == "list":
            return EnvStep(info=[1])
        if action == "set":
            return EnvStep(info={"seen": {1}})
        if action == "hotter":
            return EnvStep(sampling=replace(self.sampling, temperature=2.0))
        return EnvStep(observation=action, reward=0.5, done=action == "done", info={"start": self.start})

    async def close(self):
        Counter.closed += 1
        if self.start == 99:
            raise OSError("cannot close")


def in_process(cls: type[Env]) -> Resolved:
    return Resolved("env", cls.name, cls, "in process", "", cls.name)


def play(
    resolved: Resolved, *actions: str, start: int = 1, sampling: Sampling | None = None, **options
) -> list[EnvStep]:
    async def scenario():
        episodes = Episodes(resolved, None, section(**options))
        episode = episodes.open()
        episode.sampling = sampling
        try:
            assert await episode.reset(row(start=start), seed=2) == f"start {start + 2}"
            return [await episode.step(a) for a in actions]
        finally:
            await episode.close()
            await episode.close()
            episodes.close()

    return asyncio.run(scenario())


def test_an_episode_answers_and_is_closed_once() -> None:
    steps = play(in_process(Counter), "a", "done")
    assert [(s.observation, s.reward, s.done) for s in steps] == [("a", 0.5, False), ("done", 0.5, True)]
    assert Counter.closed == 1


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", r"env 'counter' \(in process\): step\(\) raised ValueError: bad action \(.*test_episodes.py:\d+\)"),
        ("hang", r"step\(\) took longer than its deadline of 0.2 s and was cancelled.*deadline"),
        ("none", r"step\(\) returned NoneType None; allowed: an EnvStep"),
        ("nan", r"step\(\) returned EnvStep\(reward=nan\); allowed: a finite number"),
        ("huge", r"step\(\) returned EnvStep\(reward=int 1000.*; allowed: a finite number"),
        ("list", r"step\(\) returned EnvStep\(info=list \[1\]\); allowed: a dict"),
        ("set", r"step\(\) returned EnvStep\(info=...\) whose info.seen is a set"),
    ],
)
def test_a_failing_step_is_an_env_error_and_still_closes_once(action: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        play(in_process(Counter), "a", action, deadline=0.2)
    assert Counter.closed == 1


def test_a_failing_reset_closes_too() -> None:
    with pytest.raises(EnvError, match=r"reset\(\) raised ValueError: negative start"):
        play(in_process(Counter), start=-9)
    assert Counter.closed == 1


def test_close_that_fails_is_an_error_unless_something_failed_before() -> None:
    with pytest.raises(EnvError, match=r"close\(\) raised OSError: cannot close"):
        play(in_process(Counter), "a", start=97)
    with pytest.raises(EnvError, match=r"bad action"):
        play(in_process(Counter), "raise", start=97)


def test_an_env_that_never_ends_is_ended_at_max_turns() -> None:
    steps = play(in_process(Counter), "a", "b", "c", max_turns=3)
    assert [s.done for s in steps] == [False, False, True]
    assert steps[2].info == {"start": 3, "max_turns": True}
    with pytest.raises(EnvError, match=r"step\(\) was called on an episode that has ended"):
        play(in_process(Counter), "a", "b", max_turns=1)


def test_mixed_methods_are_refused() -> None:
    class Mixed(Counter):
        name = "mixed"

        def close(self):
            return None

    with pytest.raises(PluginInvalid, match=r"reset, step is `async def` and close is plain `def`"):
        Episodes(in_process(Mixed), None, section())


PLAIN = """
import os
from dataclasses import replace
from rlhf.interfaces import ComponentConfig, Env
from rlhf.types import EnvStep, Sampling

class Plain(Env):
    class Config(ComponentConfig):
        log: str = ""

    def reset(self, row, seed):
        self.row, self.state = row, 0
        return f"start {row['start'] + seed}"

    def step(self, action):
        if action == "exit":
            os._exit(1)
        self.state += 1
        return EnvStep(observation=f"{self.state}", reward=0.5, done=action == "done",
                       sampling=replace(self.sampling or Sampling(), max_new_tokens=3, stop=(";",)),
                       info={"pid": os.getpid()})

    def close(self):
        if self.config.log:
            open(self.config.log, "a").write("closed\\n")
"""


@pytest.fixture
def plain(from_file) -> Resolved:
    return from_file("env", PLAIN)


def test_one_plain_episode_fails_alone(plain) -> None:
    async def play_episode(episodes: Episodes, *actions: str) -> list[EnvStep]:
        episode = episodes.open()
        try:
            await episode.reset(row(start=0), 0)
            return [await episode.step(a) for a in actions]
        finally:
            await episode.close()

    async def scenario():
        episodes = Episodes(plain, None, section(concurrency=2))
        try:
            assert episodes.limit == 2
            return await asyncio.gather(
                play_episode(episodes, "a", "exit"),
                play_episode(episodes, "a", "b"),
                play_episode(episodes, "a", "b"),
                return_exceptions=True,
            )
        finally:
            episodes.close()

    bad, *good = asyncio.run(scenario())
    assert isinstance(bad, EnvError)
    with pytest.raises(EnvError, match=r"its worker process exited with code 1 during step\(\)"):
        raise bad
    assert [[s.observation for s in steps] for steps in good] == [["1", "2"], ["1", "2"]]  # no shared state


def test_concurrency_is_a_limit_on_open_episodes_and_workers_are_reused(plain, tmp_path) -> None:
    log = tmp_path / "log"

    async def scenario():
        episodes = Episodes(plain, plain.cls.Config(log=str(log)), section(concurrency=2))
        open_now, peak, pids, pair = 0, 0, set(), asyncio.Barrier(2)

        async def play_episode() -> None:
            nonlocal open_now, peak
            episode = episodes.open()
            try:
                await episode.reset(row(start=0), 0)
                open_now += 1
                peak = max(peak, open_now)
                pids.add((await episode.step("a")).info["pid"])
                await pair.wait()  # two must be open at once to get past this
                open_now -= 1
            finally:
                await episode.close()

        try:
            await asyncio.gather(*(play_episode() for _ in range(6)))
        finally:
            episodes.close()
        return peak, pids

    peak, pids = asyncio.run(scenario())
    assert peak == 2
    assert len(pids) == 2
    assert log.read_text() == "closed\n" * 6


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_an_env_sees_and_may_replace_the_sampling_parameters(plain, kind: str) -> None:
    sampling = Sampling(max_new_tokens=7, top_k=5)
    (step,) = play(in_process(Counter) if kind == "async" else plain, "hotter", sampling=sampling)
    changes = {"temperature": 2.0} if kind == "async" else {"max_new_tokens": 3, "stop": (";",)}
    assert step.sampling == replace(sampling, **changes)


def test_the_limit_is_the_option_or_the_default_for_plain_or_async(plain) -> None:
    assert Episodes(in_process(Counter), None, section()).limit == 256
    assert Episodes(plain, None, section()).limit == 16
    assert Episodes(in_process(Counter), None, section(concurrency=3)).limit == 3


def test_a_row_that_cannot_be_sent_to_a_worker_is_the_environments_failure(plain) -> None:
    async def scenario():
        episodes = Episodes(plain, None, section(deadline=5.0))
        try:
            episode = episodes.open()
            with pytest.raises(EnvError, match=r"asking its worker process for reset\(\) raised"):
                await episode.reset(row(start=lambda: 0), 0)
            await episode.close()
            second = episodes.open()
            assert await second.reset(row(start=1), 0) == "start 1"
            await second.close()
        finally:
            episodes.close()

    asyncio.run(scenario())


class Seats(Env):
    """Two agents; the row says what the environment returns wrongly."""

    name = "seats"

    @classmethod
    def agents(cls, config):
        return ("a", "b")

    async def reset(self, row, seed):
        self.step_ = row["step"]
        return row["opening"]

    async def step(self, action):
        return self.step_


FIRST = EnvStep("begin", agent="a")


@pytest.mark.parametrize(
    ("opening", "step", "message"),
    [
        ("begin", None, r"reset\(\) returned str 'begin'; allowed with several agents: EnvStep\(observation, agent"),
        (EnvStep("begin"), None, r"reset\(\) returned an EnvStep that names the agent str ''; allowed: 'a', 'b'"),
        (EnvStep(agent="a", reward=1.0), None, r"reset\(\) returned EnvStep .*allowed with several agents"),
        (FIRST, EnvStep(agent="c"), r"step\(\) returned an EnvStep that names the agent str 'c'; allowed: 'a', 'b'"),
        (FIRST, EnvStep(done=True, rewards={"c": 1.0}), "names the agent str 'c'; allowed: 'a', 'b'"),
        (FIRST, EnvStep(done=True, rewards={"a": float("nan")}), r"EnvStep\(rewards=\{'a': nan\); allowed: a finite"),
        (FIRST, EnvStep(done=True, rewards=[1.0]), r"EnvStep\(rewards=list .*allowed: \{agent: reward\}"),
    ],
)
def test_what_names_no_agent_of_the_environment_is_refused(opening, step, message) -> None:
    async def scenario():
        episode = Episodes(in_process(Seats), None, section()).open()
        await episode.reset(row(opening=opening, step=step), 0)
        await episode.step("x")

    with pytest.raises(EnvError, match=message):
        asyncio.run(scenario())


def test_an_environment_of_one_agent_names_none_and_names_differ() -> None:
    class Named(Counter):
        async def step(self, action):
            return EnvStep(agent="a")

    with pytest.raises(EnvError, match=r"names the agent str 'a'; Env.agents\(\) names no agents"):
        play(in_process(Named), "a")
    texts = ((None, "allowed: a tuple of names"), ("ab", "a tuple of names"), (("a", "a"), "allowed: distinct names"))
    for names, message in texts:
        wrong = type("Wrong", (Seats,), {"agents": classmethod(lambda cls, config, names=names: names)})
        with pytest.raises(PluginInvalid, match=message):
            Episodes(in_process(wrong), None, section())
