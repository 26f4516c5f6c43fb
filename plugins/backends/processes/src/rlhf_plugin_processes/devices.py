"""The devices of this machine: GPUs that this process may use, otherwise CPU cores."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rlhf.errors import ConfigError
from rlhf_workers.placement import Allocation, Node


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. No CUDA context is made."""
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    if listed is None:
        return [str(n) for n in range(count)]
    return [part.strip() for part in listed.split(",") if part.strip()][:count]


def node_here(cpus: int | None, gpus: Sequence[str]) -> Node:
    """
    Args:
        cpus: number of CPU cores; None: those that this process may use.

    Raises ConfigError if ``cpus`` is given beside GPUs, where cores are not counted.
    """
    if gpus and cpus is not None:
        raise ConfigError(
            f"launcher.cpus = {cpus}: ranks and engines are placed on the {len(gpus)} GPUs of this machine, and CPU "
            'cores are not counted. Leave launcher.cpus out, or hide the GPUs with CUDA_VISIBLE_DEVICES="".'
        )
    if gpus:  # one core for each rank at least, which check_fits asks for; cores are not reserved
        return Node("here", "this machine", {"CPU": float("inf"), "GPU": float(len(gpus))})
    return Node("here", "this machine", {"CPU": float(cpus or len(os.sched_getaffinity(0)))})


def gpus_of(
    allocation: Allocation, bundles: Sequence[int], nodes: Sequence[str], gpus: Sequence[str]
) -> list[str] | None:
    """The GPU ids of one worker; None without GPUs.

    Args:
        bundles: number of devices of each bundle. The GPUs of a node are given to its bundles in order.
        nodes: the node of each bundle.
        gpus: ids of the GPUs of the worker's node.
    """
    if not gpus:
        return None
    home = nodes[allocation.bundle]
    before = [sum(n for n, node in zip(bundles[:b], nodes, strict=False) if node == home) for b in range(len(bundles))]
    return [gpus[before[bundle] + index] for bundle, index in allocation.slots]
