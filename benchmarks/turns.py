"""Two processes that take turns on one device. Each imports its packages once, builds one job after another, and makes
some steps of a job when it is told to, while the other waits.

Started by gpu/throughput.py: ``python turns.py ours|trl DESCRIPTOR``, where the descriptor is a pipe's.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from settings import DEVICE, THREADS, Clock, Ended

STEPS = 100_000
"""Of a job, more than it will ever be told to make."""


kept: list[str] = []
"""The side whose engine of vLLM is kept from one job to the next, once there is one."""


class Turns(Clock):
    """Times those steps of each turn that it is told to time."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(0)
        self.connection, self.left = connection, 0

    def begin(self) -> None:
        if not self.left:
            release()  # the other process gets the memory that torch keeps in reserve
            self.connection.send({})
            self.untimed, timed = self.connection.recv()
            self.left = self.untimed + timed
            if not self.left:
                raise Ended
        self.left -= 1
        super().begin()


def release() -> None:
    if DEVICE == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def perform(side: str, job: dict[str, Any], connection: Connection) -> dict[str, Any]:
    """The result of one job: gradients of a fixed batch, or the times of steps."""
    arguments = {name: x for name, x in job.items() if name not in ("gate", "eager")} | {"work": Path(job["work"])}
    if job["gate"]:
        importlib.import_module(f"{side}_gradients").save(**arguments)
        return {}
    train = importlib.import_module(f"{side}_train")
    if "eager" in job and side not in kept:
        train.keep_engine(job["eager"])
        kept.append(side)
    if DEVICE == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    return train.measure(**arguments, clock=Turns(connection), steps=STEPS)


def main() -> None:
    side, descriptor = sys.argv[1:]
    connection = Connection(int(descriptor))
    os.set_inheritable(int(descriptor), False)
    import torch

    torch.set_num_threads(THREADS)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            answer = perform(side, job, connection)
        except Exception:
            answer = {"error": traceback.format_exc()[-6000:]}
        release()
        connection.send(answer)


if __name__ == "__main__":
    main()
