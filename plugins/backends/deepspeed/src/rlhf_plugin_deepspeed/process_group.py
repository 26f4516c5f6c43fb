"""The process group of a role's ranks: joined once per process, with a timeout that turns a hang into an error."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from rlhf.errors import CapabilityError, ConfigError, RlhfError, WorkerError
from rlhf.interfaces import ModelSpec

INSTALL = "pip install 'rlhf-kit[deepspeed]'"

_joined: tuple[str, int, int] | None = None
"""(rendezvous, rank, ranks) of the group of several ranks that this process is in."""
_node_groups: dict[int, Any] = {}
"""{ranks: those that hold a second copy of the weights among them, this one included}."""


def import_deepspeed(device: torch.device) -> Any:
    """The package, with its accelerator set to ``device`` and without its start-up messages.

    Raises: ConfigError where it is not installed or does not import, or serves another kind of device already.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        with _not_found("mlflow"):
            import deepspeed
        from deepspeed.accelerator import get_accelerator
    except Exception as cause:  # its import compiles and probes; anything can come out
        raise ConfigError(
            f"trainer 'deepspeed' needs the package deepspeed, which cannot be imported "
            f"({type(cause).__name__}: {cause}). Install it: {INSTALL}"
        ) from cause
    serves = get_accelerator().device_name().split(":")[0]
    if serves != device.type:
        raise ConfigError(
            f"deepspeed serves the accelerator {serves!r} in this process, the trainer's device is {device.type!r}: "
            f"set DS_ACCELERATOR={device.type}, or trainer.device to match"
        )
    _spare_start_up()
    # torch 2.13 renames what DeepSpeed 0.19 calls in every gather
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning
    )
    return deepspeed


@contextmanager
def _not_found(package: str) -> Iterator[None]:
    """Inside, importing ``package`` fails, if it was not imported before. DeepSpeed's autotuner, which is not used,
    takes mlflow along where it is installed: most of the import's time, in every rank."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def _spare_start_up() -> None:
    """Leave out two things of DeepSpeed's start that training never uses.

    On CPUs it compiles a C++ kernel for inference when it meets a process group (a minute or two, and a compiler),
    whose shared memory has no name that tells two roles on one machine apart. And it imports its own Muon to look up
    whether an optimizer is one, which starts torch's compiler for that Muon's sake.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None
    compiler: Any = importlib.import_module("deepspeed.runtime.compiler")
    compiles, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compiles


@contextmanager
def quiet() -> Iterator[None]:
    """Without DeepSpeed's warnings about optimizers that are not its own, and other remarks of its start."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def join(spec: ModelSpec, device: torch.device, seconds: float) -> None:
    """Make this process rank ``spec.rank`` of the role's group.

    Roles of one rank share their process's group of one. Roles of several ranks share a group only where a launcher
    gave them the same rendezvous: it then calls them in one order on all ranks.
    """
    global _joined
    who = f"role {spec.role.name!r}, rank {spec.rank} of {spec.world_size}"
    if not 0 <= spec.rank < spec.world_size:
        raise ConfigError(f"{who}: a rank lies in 0..{spec.world_size - 1}")
    os.environ.setdefault("LOCAL_RANK", "0")  # a process sees its own device only
    backend = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_initialized():
        size = dist.get_world_size()
        alone = spec.world_size == 1 == size
        if not alone and _joined != (spec.rendezvous, spec.rank, spec.world_size):
            raise CapabilityError(
                f"{who}: this process is a rank of a group of {size} already. A role of several ranks needs processes "
                "of its own: use a launcher that gives it some (capability 'ranks:many')."
            )
    elif spec.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        if not spec.rendezvous.startswith("tcp://"):
            raise ConfigError(
                f"{who}: no place to meet. ModelSpec.rendezvous must be tcp://HOST:PORT, got {spec.rendezvous!r}"
            )
        limit = timedelta(seconds=seconds)
        try:
            store = _store(spec, limit)
            dist.init_process_group(backend, store=store, rank=spec.rank, world_size=spec.world_size, timeout=limit)
        except Exception as cause:
            raise WorkerError(
                f"{who} did not meet the others at {spec.rendezvous} within {seconds:g} s "
                f"({type(cause).__name__}: {cause}). Did every rank start, and can it reach that address?"
            ) from cause
        _joined = (spec.rendezvous, spec.rank, spec.world_size)
    # DeepSpeed would make a second group of all ranks, with a timeout of its own
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    groups._WORLD_GROUP = dist.group.WORLD
    if spec.world_size > 1:
        agree_on_role(spec, who)


def _store(spec: ModelSpec, limit: timedelta) -> dist.TCPStore:
    """Where the ranks meet. Rank 0 serves it at that address alone; torch would at all addresses of the machine."""
    place = urlsplit(spec.rendezvous)
    host, port = place.hostname or "", place.port or 0
    if spec.rank:
        return dist.TCPStore(host, port, spec.world_size, timeout=limit)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        return dist.TCPStore(
            host, port, spec.world_size, is_master=True, timeout=limit, master_listen_fd=os.dup(listener.fileno())
        )


@contextmanager
def second_copies(ranks: int, seconds: float) -> Iterator[None]:
    """Inside, models are divided with a second copy among each ``ranks`` ranks (ZeRO++); 1: without one.

    DeepSpeed has room for one such group in a process: it makes it for the first model and stops at an assertion for
    the second, and a model without second copies would be given that of another. It looks there only while it divides a
    model, so the group is put there for as long, made once for all roles of the process.
    """
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    if ranks > 1 and ranks not in _node_groups:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        groups._create_zero_param_parallel_group(ranks)
        _node_groups[ranks] = groups._get_zero_param_intra_parallel_group()
        # it waits no longer than the others
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), _node_groups[ranks])
    create = groups._create_zero_param_parallel_group
    groups._create_zero_param_parallel_group = lambda _: None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = _node_groups.get(ranks)
    try:
        yield
    finally:
        groups._create_zero_param_parallel_group = create


def agree_on_role(spec: ModelSpec, who: str) -> None:
    """Every rank of the group must hold the same role of the same model."""
    facts: list[Any] = [None] * spec.world_size
    dist.all_gather_object(facts, (spec.role.name, spec.role.head, spec.role.trained, spec.path, spec.dtype))
    if len(set(facts)) > 1:
        raise ConfigError(f"{who}: the ranks that met at {spec.rendezvous} differ: {facts}")


@contextmanager
def collective(spec: ModelSpec, call: str, seconds: float) -> Iterator[None]:
    """Say which role and rank waited in vain when a collective inside fails."""
    try:
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
            f"One of them died, raised, or made another call; trainer.timeout is {seconds:g} s. The first rank that "
            "failed has the cause."
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
    """The first text over ranks that is not empty, with its rank."""
    size = dist.get_world_size()
    if size == 1:
        return text
    found: list[Any] = [None] * size
    dist.all_gather_object(found, text)
    return next((f"{t} on rank {rank}" for rank, t in enumerate(found) if t), "")


def reduce_to_first(values: torch.Tensor) -> None:
    """Sum over ranks into rank 0's ``values``, in place; those of others are undefined afterwards."""
    if dist.get_world_size() > 1:
        dist.reduce(values, dst=0)


def barrier() -> None:
    """Wait until every rank is here."""
    if dist.get_world_size() > 1:
        dist.barrier()
