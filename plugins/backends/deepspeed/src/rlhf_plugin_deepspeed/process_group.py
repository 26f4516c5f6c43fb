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
"""{number of ranks: the process group of this rank that holds a second copy of the weights}."""


def import_deepspeed(device: torch.device) -> Any:
    """The package, with its accelerator set to ``device`` and without its start-up messages.

    Raises ConfigError if it is not installed, cannot be imported, or already uses another kind of device.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        with _not_found("mlflow"):
            import deepspeed
        from deepspeed.accelerator import get_accelerator
    except Exception as cause:  # the import compiles and probes, so any exception is possible
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
    # DeepSpeed 0.19 calls functions that torch 2.13 renamed
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning
    )
    return deepspeed


@contextmanager
def _not_found(package: str) -> Iterator[None]:
    """A context in which importing ``package`` fails, unless it was imported before. DeepSpeed's autotuner, which is
    not used, imports mlflow if it is installed. That takes most of the import's time, in every rank."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def _spare_start_up() -> None:
    """Skip two steps of DeepSpeed's start, which training never uses.

    1. On CPUs DeepSpeed compiles a C++ kernel for inference when it gets a process group. This takes a minute or two
       and needs a compiler. The kernel's shared memory has the same name for two roles on one machine.
    2. DeepSpeed imports its own Muon to find out whether an optimizer is an instance of it. The import starts torch's
       compiler.
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
    """A context without DeepSpeed's warnings, among them those about optimizers that are not its own."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def join(spec: ModelSpec, device: torch.device, seconds: float) -> None:
    """Make this process rank ``spec.rank`` of the role's group.

    Roles of one rank share the process's group of one rank. Roles of several ranks share a group only if the launcher
    gave them the same rendezvous. It must call them in the same order on all ranks.
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
                f"{who}: no rendezvous address. ModelSpec.rendezvous must be tcp://HOST:PORT, got {spec.rendezvous!r}"
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
    """The store of the rendezvous. Rank 0 listens at the rendezvous address only; torch itself would listen at all
    addresses of the machine."""
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
    """A context in which models are divided with a second copy on each group of ``ranks`` ranks (ZeRO++); 1: without.

    DeepSpeed keeps one such group per process, in a global variable. It makes the group for the first model and fails
    with an assertion for the second, and a model without second copies would use the group of another model. DeepSpeed
    reads the variable only while it divides a model. So the group is made once for all roles of the process, and the
    variable is set for the duration of this context.
    """
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    if ranks > 1 and ranks not in _node_groups:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        groups._create_zero_param_parallel_group(ranks)
        _node_groups[ranks] = groups._get_zero_param_intra_parallel_group()
        # the same timeout as the other groups
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), _node_groups[ranks])
    create = groups._create_zero_param_parallel_group
    groups._create_zero_param_parallel_group = lambda _: None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = _node_groups.get(ranks)
    try:
        yield
    finally:
        groups._create_zero_param_parallel_group = create


def agree_on_role(spec: ModelSpec, who: str) -> None:
    """Raises ConfigError unless every rank of the group holds the same role of the same model."""
    facts: list[Any] = [None] * spec.world_size
    dist.all_gather_object(facts, (spec.role.name, spec.role.head, spec.role.trained, spec.path, spec.dtype))
    if len(set(facts)) > 1:
        raise ConfigError(f"{who}: the ranks that met at {spec.rendezvous} differ: {facts}")


@contextmanager
def collective(spec: ModelSpec, call: str, seconds: float) -> Iterator[None]:
    """A context that raises WorkerError, naming role, rank and call, if a collective inside loses the other ranks."""
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
    """The text of the lowest rank whose text is not empty, with that rank."""
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
    """Wait until every rank has called this function."""
    if dist.get_world_size() > 1:
        dist.barrier()
