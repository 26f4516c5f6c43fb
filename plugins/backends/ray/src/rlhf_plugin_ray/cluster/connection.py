"""Connects to a Ray cluster, or starts one for this run. A cluster that the run started leaves no processes."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import ray
from pydantic import ValidationError
from ray._private import ray_constants, services
from ray._private import worker as ray_worker
from rlhf.errors import ConfigError, WorkerError
from rlhf_workers.placement import ClusterNode

from rlhf_plugin_ray.cluster.control_process import ControlProcessMonitor, kill_own_ray, why_no_gcs, why_unreachable
from rlhf_plugin_ray.config import TOKEN, RayConfig

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # this plugin sets CUDA_VISIBLE_DEVICES of workers itself
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "true",  # an engine's children die with it
}
"""Environment variables for this process and the Ray that it starts, unless they are set already."""
_START = (
    "Start it with `ray start --head` on one node and `ray start --address HOST:6379` on the others, or remove "
    "launcher.address to run on this machine only."
)


class Cluster:
    """The connection of this process to Ray. The first launcher creates it, and the same launcher ends it."""

    def __init__(self, config: RayConfig) -> None:
        self.is_owner = not ray.is_initialized()
        if self.is_owner:
            self._connect(config)
        else:
            self._check(config)
        if threading.current_thread() is threading.main_thread():
            _keep_exit_codes()
        self.control = ControlProcessMonitor(
            ray.get_runtime_context().gcs_address, is_owner=self.is_owner and self._local
        )

    def _connect(self, config: RayConfig) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        address = config.address or _of_environment(config)
        self._local = address == "local"
        options: dict[str, Any] = {
            "address": address,
            "log_to_driver": config.show_output,
            "logging_level": "ERROR",
        }
        if address == "local":
            options |= {"include_dashboard": False, "num_cpus": config.cpus}
            if config.object_store_gib is not None:
                options["object_store_memory"] = int(config.object_store_gib * 2**30)
        if problem := why_unreachable(address) or why_no_gcs(address):
            raise ConfigError(f"no Ray cluster answers at launcher.address = {address!r}: {problem}. {_START}")
        main = threading.current_thread() is threading.main_thread()
        self._sigterm = signal.getsignal(signal.SIGTERM) if main else None
        try:
            with OwnProcesses() if address == "local" else nullcontext():
                ray.init(**options)
            # Ray prints reports about dead workers to standard output; the errors of this plugin contain them
            ray_worker._worker_logs_enabled = config.show_output
        except (ConnectionError, TimeoutError) as cause:
            raise ConfigError(
                f"no Ray cluster answers at launcher.address = {address!r}: {cause}. {_START} Or {TOKEN}."
            ) from cause
        except (RuntimeError, ValueError) as cause:  # versions of Python or Ray differ, or Ray refuses an option
            raise ConfigError(f"Ray at {address!r} cannot be used: {cause}") from cause
        except Exception as cause:
            if type(cause) is not Exception:
                raise
            raise WorkerError(  # Ray's processes did not start within Ray's own time limit
                f"Ray could not be started here: {cause} On a busy machine the next attempt may succeed. The logs of "
                "its processes are in session_latest/logs of Ray's temporary folder."
            ) from cause

    def _check(self, config: RayConfig) -> None:
        """Refuse options that request another cluster, because this process is already connected."""
        names = [name for name in ("cpus", "object_store_gib") if getattr(config, name) is not None]
        address = ray.get_runtime_context().gcs_address
        if names or config.address not in (None, "auto", address):
            options = (
                f"launcher.address = {config.address!r}" if not names else " and ".join(f"launcher.{n}" for n in names)
            )
            raise ConfigError(f"this process is already connected to the Ray cluster {address}; remove {options}")

    def nodes(self) -> list[ClusterNode]:
        """The living nodes, ordered by address."""
        nodes = [
            ClusterNode(n["NodeID"], n["NodeManagerAddress"], {k: float(v) for k, v in n["Resources"].items()})
            for n in ray.nodes()
            if n["Alive"]
        ]
        return sorted(nodes, key=lambda n: (n.address, n.id))

    def close(self) -> None:
        """Disconnect. If this object started Ray, Ray ends."""
        if self.is_owner:
            self.is_owner = False
            if self.control.lost:
                kill_own_ray()
            ray.shutdown()
            ray_worker._worker_logs_enabled = True
            if self._sigterm is not None:  # Ray replaced it
                signal.signal(signal.SIGTERM, self._sigterm)
        self.control.stop()


def _of_environment(config: RayConfig) -> str:
    """The value of RAY_ADDRESS, checked like ``launcher.address``; ``local`` if it is not set."""
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        try:
            RayConfig.model_validate({**config.model_dump(exclude_none=True), "address": address})
        except ValidationError as cause:
            problems = "; ".join(str(e["msg"]).removeprefix("Value error, ") for e in cause.errors())
            raise ConfigError(f"RAY_ADDRESS = {address!r} in the environment: {problems}") from None
    return address


def _keep_exit_codes() -> None:
    """Reset SIGCHLD. With its subreaper, Ray ignores this signal in the driver too, and the driver then loses the exit
    codes of its child processes.

    Python does not see a signal that C code ignores, and a process can inherit the ignored signal from its parent.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, handler if callable(handler) else signal.SIG_DFL)


class OwnProcesses:
    """Context in which a starting Ray uses the address 127.0.0.1, so that no other machine can reach it, and runs in
    sessions of its own.

    Without Ray's switch for laptops, Ray uses the machine's network address, regardless of its options. In the process
    group of the run, Ray would end by a signal to the group (of `timeout`, of a terminal that is closed). The run gets
    the signal too, and needs Ray to finish its step and to save.
    """

    def __enter__(self) -> None:
        self._old_settings = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR)
        self._popen = services.ConsolePopen
        vars(services)["ConsolePopen"] = partial(self._popen, start_new_session=True)
        ray_constants.ENABLE_RAY_CLUSTER = False
        os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"

    def __exit__(self, *_: object) -> None:
        vars(services)["ConsolePopen"] = self._popen
        ray_constants.ENABLE_RAY_CLUSTER, variable = self._old_settings
        if variable is None:
            del os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR]
        else:
            os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = variable
