"""DeepSpeed in a process: its import, its messages, and the process groups that it keeps in global variables."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rlhf.errors import ConfigError
from rlhf.interfaces import ModelSpec
from rlhf_modeling.sharded.process_group import join

INSTALL = "pip install deepspeed"

_node_groups: dict[int, Any] = {}
"""{number of ranks: the process group of this rank that holds a second copy of the weights}."""


def import_deepspeed(device: torch.device) -> Any:
    """Import the package, with its accelerator set to ``device`` and without its start-up messages.

    Raises ConfigError if it is not installed, cannot be imported, or already uses another kind of device.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        with _not_found("mlflow"):
            import deepspeed
        from deepspeed.accelerator import get_accelerator
    except Exception as cause:  # the import compiles and probes, so it may raise any exception
        raise ConfigError(
            f"trainer 'deepspeed' needs the package deepspeed, which cannot be imported "
            f"({type(cause).__name__}: {cause}). Install it: {INSTALL}"
        ) from cause
    serves = get_accelerator().device_name().split(":")[0]
    if serves != device.type:
        raise ConfigError(
            f"deepspeed uses the accelerator {serves!r} in this process, but the trainer's device is {device.type!r}: "
            f"set DS_ACCELERATOR={device.type}, or set trainer.device to match"
        )
    _spare_start_up()
    # DeepSpeed 0.19 calls functions that torch 2.13 renamed
    warnings.filterwarnings(
        "ignore", r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated", FutureWarning
    )
    return deepspeed


@contextmanager
def _not_found(package: str) -> Iterator[None]:
    """Context in which importing ``package`` fails, unless it was imported before. DeepSpeed's autotuner, which is not
    used, imports mlflow if it is installed. This takes most of the import's time, in every rank."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def _spare_start_up() -> None:
    """Skip two steps of DeepSpeed's start that training never needs.

    1. On CPUs DeepSpeed compiles a C++ kernel for inference when it gets a process group. This takes a minute or two
       and needs a compiler. The kernel's shared memory has the same name for two roles on one machine.
    2. DeepSpeed imports its own Muon to check whether an optimizer is an instance of it. The import starts torch's
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
    """Context without DeepSpeed's warnings, such as those about optimizers that are not its own."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def join_group(spec: ModelSpec, device: torch.device, seconds: float) -> None:
    """:func:`rlhf_modeling.sharded.process_group.join`, also for DeepSpeed. Otherwise DeepSpeed would create a second
    group of all ranks, with a different timeout, and could create no group of some ranks before its first model."""
    join(spec, device, seconds)
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    groups._WORLD_GROUP = dist.group.WORLD
    comm: Any = importlib.import_module("deepspeed.comm")
    with quiet():
        comm.init_distributed()


@contextmanager
def second_copies(ranks: int, seconds: float) -> Iterator[None]:
    """Context in which models are divided with a second copy on each group of ``ranks`` ranks (ZeRO++); 1: without a
    copy.

    DeepSpeed keeps one such group per process, in a global variable. It creates the group for the first model and fails
    with an assertion for the second. A model without second copies would use the group of another model. DeepSpeed
    reads the variable only while it divides a model. So the group is created once for all roles of the process, and the
    variable is set only in this context.
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
