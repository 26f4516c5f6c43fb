"""Prints what a rank was doing, before NCCL ends its process.

Where a rank waits for another one in vain, gloo raises in the thread that waits. NCCL does not: ``trainer.timeout``
seconds after the exchange began a thread of its own aborts the process, and its message names neither role nor call.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist
from rlhf.interfaces import ModelSpec

_QUIET = 0.8
"""Of the timeout: how long nothing moves before the message. The last tenth is left for writing it."""
_LOOKS = 20
"""Looks at the thread in the time of the timeout."""


@contextmanager
def watched(spec: ModelSpec, call: str, seconds: float) -> Iterator[None]:
    """A context. While this thread stays at one place inside, and the ranks begin no exchange, a message with role,
    rank, call and stack goes to standard error, once, shortly before the ``seconds`` of the timeout are over."""
    if spec.world_size == 1 or not ends_process():
        yield
        return
    end = threading.Event()
    work = (threading.get_ident(), f"role {spec.role.name!r}, rank {spec.rank} of {spec.world_size}: {call}()")
    threading.Thread(target=_watch, args=(end, *work, seconds), daemon=True, name="rlhf-hang-watch").start()
    try:
        yield
    finally:
        end.set()


def ends_process() -> bool:
    """Whether the group of this process ends it after the timeout of an exchange."""
    return dist.is_initialized() and "nccl" in dist.get_backend()


def _watch(end: threading.Event, thread: int, what: str, seconds: float) -> None:
    place, since = None, time.monotonic()
    while not end.wait(seconds / _LOOKS):
        frame, now = sys._current_frames().get(thread), time.monotonic()
        if frame is None:  # the thread has ended
            return
        if (here := _place(frame)) != place:
            place, since = here, now
        elif now - since >= _QUIET * seconds:
            stack = "".join(traceback.format_stack(frame)).rstrip()
            sys.stderr.write(
                f"{what} has not moved for {now - since:.0f} s. If it waits for another rank, NCCL ends this process "
                f"when trainer.timeout ({seconds:g} s) is over. One of the other ranks died, raised, or made another "
                f"call: the first rank that failed has the cause. Its stack, innermost frame last:\n{stack}\n"
            )
            sys.stderr.flush()
            return


def _place(frame: FrameType | None) -> tuple[Any, ...]:
    """Where a thread is, and how many exchanges the ranks have begun."""
    frames: list[Any] = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    world: Any = dist.group.WORLD
    return (0 if world is None else world._get_sequence_number_for_group(), *frames)
