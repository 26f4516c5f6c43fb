"""Episodes of environments: every call has a deadline, each episode is closed once, a failure fails only its sample."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

from rlhf.errors import EnvError, PluginInvalid, boundary
from rlhf.interfaces import ComponentConfig, Env
from rlhf.plugins import Resolved
from rlhf.types import EnvStep, Row

from rlhf_runtime.calls.deadlines import DeadlineExpired, cause, with_deadline
from rlhf_runtime.calls.isolation import check_python
from rlhf_runtime.calls.plugin_worker import PluginWorker, WorkerPool
from rlhf_runtime.calls.returned_values import (
    InvalidResult,
    agents_of,
    check_opening,
    check_step,
    opening_from_json,
    step_from_json,
)
from rlhf_runtime.config.sections import EnvSection
from rlhf_runtime.observe.timeline import Slice

METHODS = ("reset", "step", "close")
PROCESSES = 16
"""Default number of episodes open at once when each has a worker process."""
ASYNC = 256
"""Default number of episodes open at once when they share the event loop. Engines rarely answer more requests at once,
and servers rarely accept more connections."""


class Episodes:
    """Opens the episodes of one ``[env]`` section. ``close`` ends the worker processes.

    Raises PluginInvalid if some of the environment's methods are ``async def`` and some plain ``def``, or if its agents
    have no names. Raises ConfigError if the environment cannot have its own Python, or if that Python is not a program.
    """

    def __init__(self, resolved: Resolved, config: ComponentConfig | None, section: EnvSection) -> None:
        self.resolved, self.config, self.section = resolved, config, section
        methods = [m for m in METHODS if getattr(resolved.cls, m) is not getattr(Env, m)]
        coroutines = [m for m in methods if inspect.iscoroutinefunction(getattr(resolved.cls, m))]
        if coroutines and coroutines != methods:
            plain = [m for m in methods if m not in coroutines]
            raise PluginInvalid(
                f"{resolved}: {', '.join(coroutines)} is `async def` and {', '.join(plain)} is plain `def`; "
                "write all of an environment's methods as `async def`, or all as plain `def`"
            )
        if section.python is not None:
            check_python(resolved, section.python, in_worker=not coroutines)
        self.agents = agents_played(resolved, config)
        """Names of the agents that the policy plays; empty if it plays one agent without a name."""
        self.limit = section.concurrency or (ASYNC if coroutines else PROCESSES)
        """Largest number of open episodes. Further episodes in worker processes wait in ``reset`` until another is
        closed. A caller whose samples wait for each other must not start more episodes than this, or all of them wait
        forever."""
        self.pool = None
        """The worker processes of a plain environment."""
        if not coroutines:
            make = partial(PluginWorker, resolved, config, EnvError, python=section.python)
            self.pool = WorkerPool(make, self.limit)

    async def start(self) -> None:
        """Start a worker process of an environment with its own Python. If this Python lacks a package, the run stops
        here, before anything is generated."""
        if self.pool is not None and self.section.python is not None:
            with boundary(EnvError, f"{self.resolved}: starting its worker process"):
                self.pool.release(await self.pool.acquire())

    def open(self, sample: Slice | None = None) -> Episode:
        """A fresh episode. Its environment or worker process starts in ``reset``.

        Args:
            sample: the slice of the timeline that shows the calls.
        """
        return Episode(self, sample or Slice())

    def close(self) -> None:
        """End the worker processes."""
        if self.pool is not None:
            self.pool.close()


def agents_played(resolved: Resolved, config: ComponentConfig | None) -> tuple[str, ...]:
    """The agents that the policy plays in an environment. Raises PluginInvalid if they have no names."""
    try:
        return agents_of(resolved.cls, config)
    except InvalidResult as error:
        raise PluginInvalid(f"{resolved}: agents() {error}") from None


class Episode(Env):
    """One episode, as the rollout sees it. Every failure is an EnvError that names the environment and the call.

    Step number ``max_turns`` always ends the episode. If the environment did not end it, ``info["max_turns"]`` is True.
    An environment whose process died, or was killed at a deadline, is not closed.
    """

    def __init__(self, episodes: Episodes, sample: Slice) -> None:
        self.name = episodes.resolved.cls.name  # type: ignore[misc]
        self._resolved, self._config, self._section = episodes.resolved, episodes.config, episodes.section
        self._pool, self._agents, self._sample = episodes.pool, episodes.agents, sample
        self._env: Env | None = None
        self._worker: PluginWorker | None = None
        self._steps, self._over, self._closed, self._failed = 0, False, False, False
        self.numbers: dict[str, float] = {}
        """The numbers in the steps' ``info``. The last value of each key is kept."""

    async def reset(self, row: Row, seed: int) -> str | EnvStep:
        if self._env is not None or self._worker is not None or self._closed:
            raise EnvError(f"{self._resolved}: reset() was called twice; open a new episode for every sample")
        if self._pool is not None:
            with boundary(EnvError, f"{self._resolved}: starting its worker process"):
                self._worker = await self._pool.acquire()
            opening: str | EnvStep = await self._remote("reset", row, seed, self.sampling)
            return opening
        try:
            self._env = self._resolved.cls(self._config)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise EnvError(f"{self._resolved}: building it raised {cause(error)}") from error
        begun: str | EnvStep = await self._local("reset", row, seed)
        return begun

    async def step(self, action: str) -> EnvStep:
        if self._over or self._closed or (self._env is None and self._worker is None):
            state = "ended" if self._over else "closed" if self._closed else "not been reset"
            raise EnvError(f"{self._resolved}: step() was called on an episode that has {state}")
        if self._env is not None:
            step: EnvStep = await self._local("step", action)
        else:
            step = await self._remote("step", action, self.sampling)
        self._steps += 1
        if self._steps >= self._section.max_turns and not step.done:
            step = replace(step, done=True, info={**step.info, "max_turns": True})
        self._over = step.done
        self.numbers |= {k: float(v) for k, v in step.info.items() if isinstance(v, bool | int | float) and isfinite(v)}
        if step.done:  # so that its mean over samples is the share of truncated episodes
            self.numbers.setdefault("max_turns", 0.0)
        return step

    async def close(self) -> None:
        """Close the environment. Further calls do nothing. An error of the environment's own ``close`` is raised only
        if no earlier call failed, so that the caller sees the first cause."""
        if self._closed:
            return
        self._closed, failed_before = True, self._failed
        worker, self._worker = self._worker, None
        try:
            if worker is not None and worker.alive:
                await worker.call("close", deadline=self._section.deadline)
            elif self._env is not None:
                await self._local("close")
        except Exception:
            if worker is not None:
                worker.kill()
            if not failed_before:
                raise
        finally:
            if worker is not None and self._pool is not None:
                self._pool.release(worker)

    async def _remote(self, method: str, *arguments: Any) -> Any:
        assert self._worker is not None
        check: Any = {"reset": opening_from_json, "step": step_from_json}[method]
        try:
            asking = boundary(EnvError, f"{self._resolved}: asking its worker process for {method}()")
            with asking, self._sample.child(f"environment {method}"):
                answer = await self._worker.call(method, *arguments, deadline=self._section.deadline)
            return check(answer, self._agents)
        except InvalidResult as error:
            self._failed = True
            raise EnvError(f"{self._resolved}: {method}() {error}") from None
        except BaseException:
            self._failed = True
            raise

    async def _local(self, method: str, *arguments: Any) -> Any:
        assert self._env is not None
        deadline = self._section.deadline
        check: Any = {"reset": check_opening, "step": check_step, "close": lambda *result: None}[method]
        try:
            self._env.sampling = self.sampling
            call: Any = getattr(self._env, method)(*arguments)
            with self._sample.child(f"environment {method}"):
                # close() of the base class returns None instead of a coroutine.
                return check(None if call is None else await with_deadline(call, deadline), self._agents)
        except BaseException as error:
            self._failed = True
            if isinstance(error, DeadlineExpired):
                raise EnvError(
                    f"{self._resolved}: {method}() took longer than its deadline of {deadline:g} s and was cancelled. "
                    "Make it faster or raise `deadline` in [env]."
                ) from None
            if isinstance(error, InvalidResult):
                raise EnvError(f"{self._resolved}: {method}() {error}") from None
            if not isinstance(error, Exception):
                raise
            raise EnvError(f"{self._resolved}: {method}() raised {cause(error)}") from error
