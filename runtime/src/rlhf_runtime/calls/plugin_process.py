"""The program of a worker process: it serves one plugin over a socket. ``plugin_worker.py`` starts it as
``python -m rlhf_runtime.calls.plugin_process SOCKET``. It does not import torch by itself.

Requests are pickled by the driver. Replies are JSON, so the driver executes nothing that plugin code returns. A frame
consists of the length of its body (8 bytes, big endian) and the body.
"""

from __future__ import annotations

import faulthandler
import json
import numbers
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from base64 import b64encode
from dataclasses import fields
from typing import Any

from packaging.requirements import Requirement
from rlhf.plugins.requirements import installed_version, unmet
from rlhf.supervisor import ignore_stops
from rlhf.types import EnvStep, Group, RewardResult, Row, Sampling

from rlhf_runtime.calls.deadlines import cause
from rlhf_runtime.calls.returned_values import (
    InvalidResult,
    agents_of,
    check_opening,
    check_results,
    check_step,
)

HEADER = struct.Struct("!Q")


class RewardHost:
    """One reward instance, built once."""

    def __init__(self, cls: type[Any], config: Any) -> None:
        self._reward = cls(config)

    def score(self, group: Group) -> Any:
        trajectories = [*group.trajectories]
        return check_results(self._reward.score(group), trajectories, group.trajectories)


class EnvHost:
    """Runs one episode at a time, each with a new instance of the environment."""

    def __init__(self, cls: type[Any], config: Any) -> None:
        self._cls, self._config = cls, config
        self._env: Any = None
        self._agents = agents_of(cls, config)

    def reset(self, row: Row, seed: int, sampling: Sampling | None) -> Any:
        self._env = self._cls(self._config)
        self._env.sampling = sampling
        return check_opening(self._env.reset(row, seed), self._agents)

    def step(self, action: str, sampling: Sampling | None) -> Any:
        self._env.sampling = sampling
        return check_step(self._env.step(action), self._agents)

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()


HOSTS: dict[str, type[RewardHost] | type[EnvHost]] = {"reward": RewardHost, "env": EnvHost}


def main() -> None:
    """Serve requests until the driver closes the connection."""
    ignore_stops()
    connection = socket.socket(fileno=int(sys.argv[1]))
    # A program that the plugin starts would keep the connection open after this process has died.
    connection.set_inheritable(False)
    if sys.platform != "linux":
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    faulthandler.enable(all_threads=False)  # other threads would displace the error from the last lines
    host: Any = None
    process_id = os.getpid()
    while (request := receive(connection)) is not None:
        try:
            name, arguments = pickle.loads(request)
            if name == "path":
                sys.path[:] = arguments[0]
                reply = None
            elif name == "unmet":
                reply = unmet_requirements(*arguments)
            elif name == "build":
                resolved, config = pickle.loads(arguments[0]), arguments[1]
                host = HOSTS[resolved.kind](resolved.cls, config and resolved.cls.Config.model_validate_json(config))
                reply = None
            else:
                reply = getattr(host, name)(*arguments)
            answer = json.dumps({"reply": reply}, default=plain)
        except InvalidResult as error:
            answer = json.dumps({"invalid": str(error)})
        except Exception as error:
            answer = json.dumps({"raised": cause(error)})
        if os.getpid() != process_id:  # a fork made by the plugin returned here and must not answer
            os._exit(0)
        send(connection, answer.encode())


def unmet_requirements(texts: list[str], extra: str) -> list[str]:
    """The requirements that the packages of this Python do not meet, with the reasons."""
    requirements = [Requirement(text) for text in texts]
    return [problem for r in requirements if (problem := unmet(r, installed_version(r.name), extra))]


def plain(value: object) -> Any:
    """Converts results, their images, and numbers of other libraries in ``info`` to JSON values. Raises InvalidResult
    for anything else."""
    if isinstance(value, RewardResult | EnvStep | Sampling):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise InvalidResult(f"returned info with a {type(value).__name__}; allowed: numbers, text, lists and dicts of them")


def end_with(driver: int) -> None:
    """Kill this process and its group when its parent, the driver, has ended. On Linux the driver's supervisor does
    this, also for code that never releases the interpreter's lock (:mod:`rlhf.children`)."""
    while os.getppid() == driver:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(HEADER.pack(len(body)) + body)


def receive(connection: socket.socket) -> bytes | None:
    """The next frame's body; None if the driver has closed the connection."""
    header = _exactly(connection, HEADER.size)
    return None if header is None else _exactly(connection, HEADER.unpack(header)[0])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    main()
