"""The process group of a role's ranks: joined once per process, with a timeout that turns a hang into an error."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from rlhf.errors import CapabilityError, ConfigError, RlhfError, WorkerError
from rlhf.interfaces import ModelSpec

_joined: tuple[str, int, int] | None = None
"""(rendezvous, rank, number of ranks) of this process's group of several ranks."""


def join(spec: ModelSpec, device: torch.device, seconds: float) -> None:
    """Make this process rank ``spec.rank`` of the role's group.

    Roles of one rank share the process's group of one rank. Roles of several ranks share a group only if the launcher
    gave them the same rendezvous. The launcher must then call them in the same order on all ranks.
    """
    global _joined
    name = f"role {spec.role.name!r}, rank {spec.rank} of {spec.world_size}"
    if not 0 <= spec.rank < spec.world_size:
        raise ConfigError(f"{name}: a rank must be in 0..{spec.world_size - 1}")
    os.environ.setdefault("LOCAL_RANK", "0")  # a process sees only its own device
    backend = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_initialized():
        size = dist.get_world_size()
        is_single = spec.world_size == 1 == size
        if not is_single and _joined != (spec.rendezvous, spec.rank, spec.world_size):
            raise CapabilityError(
                f"{name}: this process is already a rank of a group of {size}. A role of several ranks needs separate "
                "processes: use a launcher that starts them (capability 'ranks:many')."
            )
    elif spec.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        if not spec.rendezvous.startswith("tcp://"):
            raise ConfigError(
                f"{name}: no rendezvous address. ModelSpec.rendezvous must be tcp://HOST:PORT, got {spec.rendezvous!r}"
            )
        limit = timedelta(seconds=seconds)
        try:
            store = _store(spec, limit)
            dist.init_process_group(backend, store=store, rank=spec.rank, world_size=spec.world_size, timeout=limit)
        except Exception as cause:
            raise WorkerError(
                f"{name} could not connect to the other ranks at {spec.rendezvous} within {seconds:g} s "
                f"({type(cause).__name__}: {cause}). Check that every rank started and can reach that address."
            ) from cause
        _joined = (spec.rendezvous, spec.rank, spec.world_size)
    if spec.world_size > 1:
        agree_on_role(spec, name)


def _store(spec: ModelSpec, limit: timedelta) -> dist.TCPStore:
    """The store of the rendezvous. Rank 0 listens at the rendezvous address only; torch itself would listen at all
    addresses of the machine."""
    place = urlsplit(spec.rendezvous)
    host, port = place.hostname or "", place.port or 0
    if spec.rank:
        return dist.TCPStore(host, port, spec.world_size, timeout=limit)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        # The store closes the descriptor that it gets, and the listener closes its own.
        return dist.TCPStore(
            host, port, spec.world_size, is_master=True, timeout=limit, master_listen_fd=os.dup(listener.fileno())
        )


def agree_on_role(spec: ModelSpec, name: str) -> None:
    """Raises ConfigError unless every rank of the group holds the same role of the same model."""
    facts: list[Any] = [None] * spec.world_size
    dist.all_gather_object(
        facts, (spec.role.name, spec.role.head, spec.role.trained, spec.path, spec.dtype, spec.storage)
    )
    if len(set(facts)) > 1:
        raise ConfigError(f"{name}: the ranks at {spec.rendezvous} have different settings of the role: {facts}")


@contextmanager
def collective(spec: ModelSpec, call: str, seconds: float) -> Iterator[None]:
    """Context that raises WorkerError, with role, rank and call, if a collective inside loses the other ranks. NCCL
    ends a rank that waits in vain; the same message is then printed before (:func:`watched`)."""
    try:
        with watched(spec, call, seconds):
            yield
    except RlhfError:
        raise
    except (RuntimeError, dist.DistError) as cause:
        text = str(cause)
        lost = ("Timed out", "timed out", "Timeout", "Connection", "closed by peer", "NCCL", "Broken pipe", "gloo")
        if spec.world_size == 1 or not any(word in text for word in lost):
            raise
        raise WorkerError(
            f"role {spec.role.name!r}, rank {spec.rank} of {spec.world_size}: {call}() lost the other ranks ({text}). "
            f"One of them died, raised an error, or made a different call; trainer.timeout is {seconds:g} s. The error "
            "of the first rank that failed shows the cause."
        ) from cause


def total(values: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def largest(values: torch.Tensor) -> torch.Tensor:
    """Maximum over ranks, in place."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def first_text(text: str) -> str:
    """The first nonempty text in the order of ranks, with its rank. Empty if there is none."""
    size = dist.get_world_size()
    if size == 1:
        return text
    texts: list[Any] = [None] * size
    dist.all_gather_object(texts, text)
    return next((f"{t} on rank {rank}" for rank, t in enumerate(texts) if t), "")


def reduce_to_first(values: torch.Tensor) -> None:
    """Sum over ranks into rank 0's ``values``, in place. The values of other ranks are undefined afterwards."""
    if dist.get_world_size() > 1:
        dist.reduce(values, dst=0)


def barrier() -> None:
    """Wait until every rank has called this function."""
    if dist.get_world_size() > 1:
        dist.barrier()


_QUIET = 0.8
"""Time without progress before the message, as a share of the timeout. The last tenth is for writing it."""
_LOOKS = 20
"""Number of checks of the thread within the timeout."""


@contextmanager
def watched(spec: ModelSpec, call: str, seconds: float) -> Iterator[None]:
    """Context that detects a hang. If this thread stays at one place and the ranks begin no exchange, a message with
    role, rank, call and stack goes to standard error. It is written once, shortly before the timeout of ``seconds``
    expires.

    If a rank waits for another one in vain, gloo raises an error in the waiting thread. NCCL does not:
    ``trainer.timeout`` seconds after the start of the exchange, one of its threads aborts the process, with a message
    that names neither role nor call.
    """
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


def _watch(end: threading.Event, thread: int, label: str, seconds: float) -> None:
    place, start = None, time.monotonic()
    while not end.wait(seconds / _LOOKS):
        frame, time_s = sys._current_frames().get(thread), time.monotonic()
        if frame is None:  # the thread has ended
            return
        if (new_place := _place(frame)) != place:
            place, start = new_place, time_s
        elif time_s - start >= _QUIET * seconds:
            stack = "".join(traceback.format_stack(frame)).rstrip()
            sys.stderr.write(
                f"{label} has made no progress for {time_s - start:.0f} s. If it waits for another rank, NCCL ends "
                f"this process when trainer.timeout ({seconds:g} s) is over. One of the other ranks died, raised an "
                "error, or made a different call: the error of the first rank that failed shows the cause. The stack "
                f"of this rank, innermost frame last:\n{stack}\n"
            )
            sys.stderr.flush()
            return


def _place(frame: FrameType | None) -> tuple[Any, ...]:
    """The current place of a thread, and the number of exchanges that the ranks have begun."""
    frames: list[Any] = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    world: Any = dist.group.WORLD
    return (0 if world is None else world._get_sequence_number_for_group(), *frames)
