"""Machines of torchrun as processes of this machine, without torchrun. As a program: the process of another machine.

python torchrun_machines.py CPUS
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from rlhf_plugin_processes.config import ProcessesConfig
from rlhf_plugin_processes.torchrun.launcher import TorchrunLauncher

CPUS = 2


class Machines:
    """The processes that torchrun would start on ``count`` machines; this process is the first of them."""

    def __init__(self, count: int = 2, each: int = 1) -> None:
        """``each``: processes of a machine."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.count, self.each, self.port = count, each, port
        self.others = [
            subprocess.Popen([sys.executable, __file__, str(CPUS)], env={**os.environ, **self.variables(rank)})
            for rank in range(1, count * each)
        ]

    def variables(self, rank: int) -> dict[str, str]:
        numbers = {
            "RANK": rank,
            "WORLD_SIZE": self.count * self.each,
            "GROUP_RANK": rank // self.each,
            "GROUP_WORLD_SIZE": self.count,
            "LOCAL_RANK": rank % self.each,
            "LOCAL_WORLD_SIZE": self.each,
            "MASTER_PORT": self.port,
        }
        return {**{k: str(v) for k, v in numbers.items()}, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}

    @contextmanager
    def environment(self) -> Iterator[None]:
        """The variables of rank 0."""
        with mock.patch.dict(os.environ, self.variables(0)):
            yield

    def codes(self) -> list[int]:
        """Exit codes of the other processes, once they have ended."""
        return [process.wait(60) for process in self.others]

    def kill(self) -> None:
        for process in self.others:
            process.kill()
        self.codes()


class MachinesLauncher(TorchrunLauncher):
    """The launcher in rank 0 of its own :class:`Machines`."""

    def __init__(self, config: ProcessesConfig | None = None) -> None:
        super().__init__(config or ProcessesConfig(cpus=CPUS))
        self.machines: Machines | None = None

    def place(self, *arguments: Any, **options: Any) -> None:
        self.machines = self.machines or Machines()
        with self.machines.environment():
            super().place(*arguments, **options)


def main(cpus: int) -> None:
    TorchrunLauncher.join(ProcessesConfig(cpus=cpus))


if __name__ == "__main__":
    main(int(sys.argv[1]))
