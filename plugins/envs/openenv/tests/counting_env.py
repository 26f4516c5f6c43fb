"""An environment written with OpenEnv: ``python counting_env.py PORT`` serves it."""

from __future__ import annotations

import os
import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field


class Say(Action):
    message: str = Field(max_length=20)


class Heard(Observation):
    text: str


class Counting(Environment):
    """The policy counts up from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._next = seed
        return Heard(text=f"Count from {seed}.")

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "raise":
            raise ValueError("the environment is broken")
        if action.message == "die":
            os._exit(3)
        if action.message == "sleep":
            time.sleep(60)
        right = action.message == str(self._next)
        self._next += 1
        return Heard(text="right" if right else "wrong", reward=float(right), done=self._next > 4)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Counting, Say, Heard, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
