"""Probes of Ray, which run in a child process of ``rlhf doctor``."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

from rlhf_plugin_ray.checks import node_facts

Report = Callable[[Any], None]


def ray_version(argument: Any, report: Report) -> None:
    """Ray's version."""
    import ray

    report(ray.__version__)


def start(argument: Any, report: Report) -> None:
    """Start a small separate Ray, only on the loopback interface, run one task, and stop it."""
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    with tempfile.TemporaryDirectory(prefix="rlhf-doctor-") as folder:  # not /tmp/ray, which a running Ray uses
        options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 80 * 2**20, "_temp_dir": folder}
        ray.init(address="local", num_cpus=1, log_to_driver=False, **options)
        try:
            look: Any = ray.remote(node_facts.collect_facts)
            report(sorted(ray.get(look.remote([]), timeout=60)))
        finally:
            ray.shutdown()


def nodes(argument: dict[str, Any], report: Report) -> None:
    """Connect to a Ray cluster and collect the facts about every node.

    ``argument``: ``address``, ``timeout`` (seconds) and ``paths``, which should exist on every node. Reports ``nodes``
    (id, address, resources), followed by one value per node: id, ``versions``, ``missing`` paths, ``shm`` bytes; or
    ``error``.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(node_facts)
    ray.init(address=argument["address"], log_to_driver=False, logging_level=logging.ERROR)
    alive = [node for node in ray.nodes() if node["Alive"]]
    keys = {"id": "NodeID", "address": "NodeManagerAddress", "resources": "Resources"}
    report({"nodes": [{name: node[key] for name, key in keys.items()} for node in alive]})
    look: Any = ray.remote(num_cpus=0)(node_facts.collect_facts)
    answers = {
        node["NodeID"]: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(argument["paths"])
        for node in alive
    }
    for node, answer in answers.items():
        try:
            report({"id": node} | ray.get(answer, timeout=argument["timeout"]))
        except RayError as error:
            report({"id": node, "error": f"{type(error).__name__}: {error}".splitlines()[0]})
