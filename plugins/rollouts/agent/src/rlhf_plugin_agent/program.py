"""The process of a program: its environment, its end and its result."""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.children import Child
from rlhf.errors import RolloutError
from rlhf_endpoint.child_process import Pipe, ending, passed_environment

from rlhf_plugin_agent.config import AgentConfig

_RUNNER = Path(__file__).with_name("call_function.py")
_TAIL, _LONGEST_RESULT = 2000, 2**16
"""Number of bytes kept from the end of the output, and largest size of the result."""


class AgentProgram:
    """A process. All its descendants end with it, in whatever session (:mod:`rlhf.children`). After :meth:`start`,
    ``async with`` ends them all.

    Args:
        task: input of the program, as JSON values.
        secret: the key of the sample, which is left out of messages.
    """

    def __init__(self, config: AgentConfig, task: Mapping[str, Any], base_url: str, secret: str, seed: int) -> None:
        self._config, self._task, self._secret = config, task, secret
        self._environment = {
            **passed_environment(config.environment, config.own_python),
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": secret,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": secret,
            "RLHF_SEED": str(seed),
        }
        self._child: Child | None = None

    async def start(self) -> None:
        """Raises RolloutError: the process cannot be started."""
        command, task = self._command(), _as_json(self._task)
        self._output, self._result = Pipe(_TAIL), Pipe(_LONGEST_RESULT)
        # a file, because a write to a pipe would wait for a program that does not read its task
        with tempfile.TemporaryFile() as standard_input:
            standard_input.write(task)
            standard_input.seek(0)
            try:
                if shutil.which(command[0], path=self._environment.get("PATH")) is None:
                    raise FileNotFoundError(f"no such program: {command[0]!r}")
                self._child = Child(
                    command,
                    stdin=standard_input.fileno(),
                    stdout=self._output.write_end,
                    stderr=self._output.write_end,
                    pass_fds=(self._result.write_end,),
                    env={**self._environment, "RLHF_RESULT_FD": str(self._result.write_end)},
                )
            except OSError as error:
                self._close()
                raise RolloutError(f"the program {command[0]!r} cannot be started: {error}") from error
            except BaseException:
                self._close()
                raise
        self._output.start()
        self._result.start()

    async def __aenter__(self) -> AgentProgram:
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._child is not None
        self._child.end()
        self._close()
        await self._child.wait_async()

    async def reward(self) -> float | None:
        """Wait for the end of the process. Returns its reward if ``returns_reward`` is set.

        Raises ProgramFailed, or RolloutError if it returned something else.
        """
        assert self._child is not None
        code = await self._child.wait_async()
        self._output.read()
        self._result.read()
        if code:
            raise ProgramFailed(f"the program {ending(code)}{self._output_text()}")
        value = self._returned()
        if value is None and self._config.returns_reward:
            raise RolloutError("the program returned no reward, but rollout.returns_reward = true. Return a number.")
        if value is not None and not self._config.returns_reward:
            raise RolloutError(
                f"the program returned {value!r:.60}. Set rollout.returns_reward = true if this is the reward, or "
                "return nothing."
            )
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise RolloutError(f"the program returned {value!r:.60} as reward; a reward is a finite number")
        return value

    def _command(self) -> Sequence[str]:
        if self._config.command is not None:
            return self._config.command
        path, function = self._config.function
        return (self._config.own_python or sys.executable, str(_RUNNER), str(path), function)

    def _returned(self) -> Any:
        data = bytes(self._result.tail)
        if not data and self._config.command is not None:
            return None
        try:
            return json.loads(data)["reward"]
        except (ValueError, KeyError, TypeError):
            if data:
                raise RolloutError(
                    f'the program sent {data[:60]!r} as its result; it must be {{"reward": NUMBER}}'
                ) from None
            raise RolloutError(f"the program ended before its function returned{self._output_text()}") from None

    def _output_text(self) -> str:
        return self._output.text().replace(self._secret, "<key>")

    def _close(self) -> None:
        self._output.close()
        self._result.close()


class ProgramFailed(Exception):
    """The process ended with an exit code that is not 0."""


def _as_json(task: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(dict(task), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise RolloutError(f"the row cannot be given to the program as JSON: {error}") from None
