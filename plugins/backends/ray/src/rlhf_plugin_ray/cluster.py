"""Connecting to a Ray cluster, or starting one for this run, and leaving no trace of it."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray._private import ray_constants
from rlhf.errors import ConfigError

from rlhf_plugin_ray.config import RayConfig
from rlhf_plugin_ray.placing import Node

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # workers are told which GPUs to see by us
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",  # an engine's children die with it
}
"""Of this process, where they are not set, and so of the Ray that it starts."""
_START = (
    "Start it with `ray start --head` on one node and `ray start --address HOST:6379` on the others, or leave "
    "launcher.address out to run on this machine alone."
)


class Cluster:
    """The connection of this process; made by the first launcher that needs it, ended by the one that made it."""

    def __init__(self, config: RayConfig) -> None:
        self.ours = not ray.is_initialized()
        if self.ours:
            self._connect(config)

    def _connect(self, config: RayConfig) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        address = config.address or os.environ.get("RAY_ADDRESS") or "local"
        options: dict[str, Any] = {
            "address": address,
            "namespace": config.namespace,
            "log_to_driver": config.show_output,
            "logging_level": "ERROR",
        }
        if address == "local":
            options |= {"include_dashboard": False, "num_cpus": config.cpus}
            if config.object_store_gib is not None:
                options["object_store_memory"] = int(config.object_store_gib * 2**30)
        try:
            with _LoopbackOnly(address == "local"):
                ray.init(**options)
        except (ConnectionError, TimeoutError) as cause:
            raise ConfigError(f"no Ray cluster answers at launcher.address = {address!r}: {cause}. {_START}") from cause
        except (RuntimeError, ValueError) as cause:  # another version of Python or Ray, or options that Ray refuses
            raise ConfigError(f"Ray at {address!r} cannot be used: {cause}") from cause

    def nodes(self) -> list[Node]:
        """Those that live, ordered by address."""
        found = [
            Node(n["NodeID"], n["NodeManagerAddress"], {k: float(v) for k, v in n["Resources"].items()})
            for n in ray.nodes()
            if n["Alive"]
        ]
        return sorted(found, key=lambda n: (n.address, n.id))

    def close(self) -> None:
        """Disconnect; a Ray that was started here ends."""
        if self.ours:
            self.ours = False
            ray.shutdown()


class _LoopbackOnly:
    """While a Ray of our own starts: it takes 127.0.0.1 as its address, so that nobody else can reach it.

    Ray takes the machine's outer address, whatever it is told, unless its switch for laptops is set.
    """

    def __init__(self, active: bool) -> None:
        self.active = active

    def __enter__(self) -> None:
        if self.active:
            self._before = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR)
            ray_constants.ENABLE_RAY_CLUSTER = False
            os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"

    def __exit__(self, *_: object) -> None:
        if self.active:
            ray_constants.ENABLE_RAY_CLUSTER, variable = self._before
            if variable is None:
                del os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR]
            else:
                os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = variable
