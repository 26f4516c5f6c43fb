"""The conformance suite of environments. Imports no torch.

::

    from rlhf_testing.env import EnvContract

    class TestMyEnv(EnvContract):
        env = MyEnv
        rows = [{"prompt": "Guess a number.", "limit": 100}]
        actions = ["50", "75", "nonsense"]
"""

from __future__ import annotations

import copy
import inspect
import json
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlhf.interfaces.env import Env
from rlhf.types import EnvStep, Sampling

from rlhf_testing import fabricate
from rlhf_testing.awaiting import call
from rlhf_testing.contract import Contract, Nonconformance, expect, knowing_columns, no_number
from rlhf_testing.leaks import leaks

Answers = list[Any]


class EnvContract(Contract):
    """Plays whole episodes twice and compares the environment's answers."""

    kind = "env"
    env: Any = None
    rows: Sequence[Mapping[str, Any]] = ({"prompt": "Begin.", "answer": "4"},)
    """Data rows. They must have every column that the environment reads."""
    actions: Sequence[str] = ("4", "yes", "", "\N{SNOWMAN}", "a longer answer " * 20)
    """The policy's answers, turn by turn. They repeat until the episode is done."""
    max_turns: int = 12
    """Maximum turns of an episode, as ``env.max_turns`` in the run file."""
    limit: float = 30.0
    """Maximum seconds for one call."""

    def row(self, index: int) -> Any:
        return fabricate.row(self.rows[index], index)

    def open(self, config: Any, index: int, seed: int) -> CheckedEpisode:
        return CheckedEpisode(self, self.label(config), self.build(config), self.row(index), seed)

    def play(self, config: Any, index: int, seed: int, first: int = 0) -> Answers:
        """A whole episode: the first observation and every step. ``first`` is the index of the first action."""
        episode = self.open(config, index, seed)
        for turn in range(self.max_turns):
            if episode.done:
                break
            episode.act(self.actions[(first + turn) % len(self.actions)])
        episode.close()
        return episode.answers

    # ------------------------------------------------------------------------------------- checks

    def test_methods(self) -> None:
        """``reset``, ``step`` and ``close`` are all ``async def`` or all plain ``def``."""
        methods = {n: getattr(self.cls, n) for n in ("reset", "step", "close")}
        if methods["close"] is Env.close:
            del methods["close"]  # the inherited close() does nothing and fits both
        kinds = {n: inspect.iscoroutinefunction(f) for n, f in methods.items()}
        expect(
            len(set(kinds.values())) <= 1,
            f"{self.label()} mixes async and plain methods: {kinds}. Async methods run on the event loop, plain ones "
            "in a worker process: use only one kind",
        )

    def test_episodes(self) -> None:
        """Observations are texts and steps are EnvSteps with finite rewards, whichever action comes first. The row is
        not changed."""
        for config in self.grid():
            for index in range(len(self.rows)):
                for first in range(len(self.actions)):
                    self.play(config, index, first % 2, first)

    def test_replay(self) -> None:
        """Equal rows, seeds and actions give equal answers, whatever the state of global random generators is and
        whichever other episodes are open."""
        for config in self.grid():
            for index in range(len(self.rows)):
                for seed in (0, 7):
                    # another state for each episode, so that draws from the module's generator are noticed
                    random.seed(1)
                    first = self.play(config, index, seed)
                    random.seed(2)
                    random.random()
                    second = self.play(config, index, seed)
                    reason = (
                        "draw from random.Random(seed) of reset(), never from the module's generator or the clock, and "
                        "keep what an episode remembers on self, never on the class or the module"
                    )
                    expect(
                        first == second,
                        f"{self.label(config)} row {index}, seed {seed}: two episodes with equal actions differ at "
                        f"answer {_differs(first, second)}: {reason}",
                    )
                    interleaved = self._interleaved(config, index, seed)
                    expect(
                        first == interleaved,
                        f"{self.label(config)} row {index}, seed {seed}: another episode open at the same time changes "
                        f"answer {_differs(first, interleaved)}: keep state in the instance, not the class or module",
                    )

    def _interleaved(self, config: Any, index: int, seed: int) -> Answers:
        main, other = self.open(config, index, seed), self.open(config, (index + 1) % len(self.rows), seed + 1)
        for turn in range(self.max_turns):
            if not other.done:
                other.act(self.actions[(turn + 1) % len(self.actions)])
            if main.done:
                break
            main.act(self.actions[turn % len(self.actions)])
        other.close()
        main.close()
        return main.answers

    def test_closes_early(self) -> None:
        """``close`` works before the first step, in the middle of an episode, and without ``reset``."""
        for config in self.grid():
            self.open(config, 0, 0).close()
            unused = self.build(config)
            try:
                call(unused.close, limit=self.limit)
            except Exception as error:
                raise Nonconformance(f"{self.label(config)} close() without reset() raises {error!r}") from error

    def test_gives_everything_back(self) -> None:
        """``close`` releases everything that an episode opened: files, connections, processes, threads. A run opens
        thousands of episodes, and the worker process of a plain environment serves many of them in turn."""
        ends = {"an episode that was played to its end": True, "one that was closed right after reset()": False}
        played = [(config, point) for config in self.grid() for point in ends]
        leftovers = leaks([partial(self._closed, config, ends[point]) for config, point in played])
        for (config, point), left in zip(played, leftovers, strict=True):
            expect(
                not left,
                f"{self.label(config)} close() of {point} always leaves {'; '.join(left)}: "
                "it must release what reset() and step() opened",
            )

    def _closed(self, config: Any, is_whole_episode: bool) -> CheckedEpisode:
        """An episode after its end. It is returned so that it is not garbage-collected, which might close its files."""
        episode = self.open(config, 0, 0)
        for turn in range(self.max_turns if is_whole_episode else 0):
            if episode.done:
                break
            episode.act(self.actions[turn % len(self.actions)])
        episode.close()
        return episode


class CheckedEpisode:
    """One environment instance, checked at every answer."""

    def __init__(self, suite: EnvContract, label: str, env: Any, row: Any, seed: int) -> None:
        self.suite, self.label, self.env, self.row = suite, label, env, row
        self.row_copy = copy.deepcopy(row)
        self.done = False
        self.agents = tuple(type(env).agents(env.config))
        self.answers: Answers = [self._call(env.reset, row, seed)]
        first = self.answers[0]
        if not self.agents:
            expect(isinstance(first, str), f"{label} reset() must return the first observation as text, got {first!r}")
            return
        has_agent = isinstance(first, EnvStep) and first == EnvStep(
            first.observation, sampling=first.sampling, agent=first.agent
        )
        expect(has_agent, f"{label} with agents() reset() must return EnvStep(observation, agent=...), got {first!r}")
        self._agent(label, first)

    def act(self, action: str) -> None:
        step = self._call(self.env.step, action)
        label = f"{self.label} the answer to {action[:20]!r}"
        expect(isinstance(step, EnvStep), f"{label} must be an EnvStep, got {step!r}")
        expect(isinstance(step.observation, str), f"{label}: the observation is {step.observation!r}, not a string")
        expect(not (wrong := no_number(step.reward)), f"{label}: the reward is {wrong}")
        wrong = "" if step.score is None else no_number(step.score)
        expect(not wrong, f"{label}: the score is {wrong} Use None if the filter should read the rewards")
        files = isinstance(step.images, (list, tuple)) and all(isinstance(image, bytes) for image in step.images)
        expect(files, f"{label}: images are {step.images!r:.60}; allowed is a tuple of bytes, the contents of files")
        expect(isinstance(step.done, bool), f"{label}: done is {step.done!r}, not True or False. Write bool(...)")
        expect(
            step.sampling is None or isinstance(step.sampling, Sampling),
            f"{label}: sampling is {step.sampling!r}; allowed is None, or a Sampling such as "
            "dataclasses.replace(self.sampling, max_new_tokens=8)",
        )
        try:
            json.dumps(dict(step.info))
        except (TypeError, ValueError) as error:
            raise Nonconformance(f"{label}: info is written to the rollouts file and must be JSON: {error}") from error
        self._agent(label, step)
        self.done = step.done
        self.answers.append(step)

    def _agent(self, label: str, step: EnvStep) -> None:
        """Check that the agents that a step names are in ``agents()``."""
        names = [*step.rewards, *([] if step.done or (step.agent == "" and not self.agents) else [step.agent])]
        strangers = [name for name in names if name not in self.agents]
        expect(not strangers, f"{label}: the step names the agent {strangers[:1]}; agents() gives {self.agents}")
        for agent, reward in step.rewards.items():
            expect(not (wrong := no_number(reward)), f"{label}: the reward of {agent!r} is {wrong}")

    def close(self) -> None:
        self._call(self.env.close)
        expect(self.row == self.row_copy, f"{self.label} the episode changed its data row, which other samples share")

    def _call(self, method: Any, *arguments: Any) -> Any:
        start = time.monotonic()
        with knowing_columns(self.label, '"rows": [{EACH}]'):
            result = call(method, *arguments, limit=self.suite.limit)
        took = time.monotonic() - start
        expect(
            took <= self.suite.limit,
            f"{self.label} {method.__name__}() took {took:.1f} s, allowed {self.suite.limit} s",
        )
        return result


def _differs(a: Answers, b: Answers) -> str:
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return f"{n} ({x!r} and {y!r})"
    return f"{min(len(a), len(b))} (one episode ended there)"
