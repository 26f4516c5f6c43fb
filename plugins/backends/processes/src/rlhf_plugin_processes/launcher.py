"""The launcher ``processes``: ranks and engines are processes of this machine, started by the run itself."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar

from pydantic import Field
from rlhf.control_groups import allowed_cores
from rlhf.errors import ConfigError, WorkerError
from rlhf.interfaces import Generator, Place
from rlhf.plugins import Resolved
from rlhf_workers.driver.handle import WorkerHandle, slug
from rlhf_workers.launcher import ReservedDevices, WorkerLauncher
from rlhf_workers.launcher_options import WorkerOptions
from rlhf_workers.placement import Allocation, ClusterNode, allocate, assign, bundles_of, check_fits, device_kind

from rlhf_plugin_processes.call_references import ProcessCalls
from rlhf_plugin_processes.shared_values import Descriptor
from rlhf_plugin_processes.worker_process import WorkerProcess

_LOOK_SECONDS = 0.2


def open_log(folder: Path | None, worker: str) -> tuple[Descriptor, str]:
    """The file for a worker's output, and a path under which this process can read it.

    Args:
        folder: folder of the file; None: the file has no name in any folder, and is deleted with the run.

    Raises ConfigError if the file cannot be created.
    """
    if folder is None:
        with tempfile.TemporaryFile(prefix="rlhf-") as file:
            nameless = Descriptor(os.dup(file.fileno()))
        # A file that is opened through /proc has its own offset. Reading it does not move that of the worker.
        return nameless, f"/proc/{os.getpid()}/fd/{nameless.number}"
    path = folder / f"{slug(worker)}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as cause:
        raise ConfigError(
            f"the output of worker {worker} cannot be written to {path}: {cause.strerror}. Free some space there, give "
            "access to it, or name another folder with --launcher.reports."
        ) from cause
    return Descriptor(descriptor), str(path.absolute())


class OutputPrinter:
    """Prints the output of workers from :meth:`add` on, each line with the worker's name."""

    def __init__(self) -> None:
        self._files: list[tuple[str, IO[bytes]]] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, worker: str, path: str) -> None:
        if any(file.name == path for _, file in self._files):  # a replaced engine continues the file
            return
        file = open(path, "rb")  # noqa: SIM115
        file.seek(0, os.SEEK_END)
        self._files.append((worker, file))
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="output of workers", daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            self._show(takes_partial=False)

    def _show(self, takes_partial: bool) -> None:
        """``takes_partial``: also print a last line without a line end."""
        for worker, file in list(self._files):
            while line := file.readline():
                if not line.endswith(b"\n") and not takes_partial:
                    # The rest of the line is not written yet.
                    file.seek(-len(line), os.SEEK_CUR)
                    break
                sys.stdout.write(f"({worker}) {line.decode(errors='replace').rstrip()}\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Print the remaining output."""
        if self._thread is not None:
            self._closed.set()
            self._thread.join()
            self._show(takes_partial=True)
            for _, file in self._files:
                file.close()
            self._thread, self._files = None, []
            self._closed.clear()


LOGS = "workers"
"""Folder for the output of workers, in the folder of reports."""


class ProcessesConfig(WorkerOptions):
    cpus: Annotated[int, Field(ge=1)] | None = None
    """Number of CPU cores for ranks and engines if this machine has no GPUs; if absent, those that this process may
    use."""


class ProcessesLauncher(WorkerLauncher):
    """Starts one process per rank and per engine. Nothing is reserved, so another run on this machine does not know of
    it.

    Each process, with all its descendants, ends when this process ends in any way (:mod:`rlhf.children`).
    """

    name = "processes"
    capabilities: ClassVar[frozenset[str]] = frozenset({"processes", "ranks:many", "answers"})
    Config = ProcessesConfig

    def __init__(self, config: ProcessesConfig | None = None) -> None:
        super().__init__(config)
        self._calls = ProcessCalls()
        self._gpus: list[str] = []
        """Ids of the GPUs that this process may use."""
        self._bundles: list[int] = []
        """Number of devices of each bundle."""
        self._logs: Path | None = None
        self._printer = OutputPrinter()

    @classmethod
    def check(cls, config: Any, places: Mapping[str, Place], generator: type[Generator] | None, transport: str) -> None:
        super().check(config, places, generator, transport)
        _check_this_process()

    def place(self, places: Mapping[str, Place], plugins: Sequence[Resolved] = (), reports: Path | None = None) -> None:
        self._begin_placing(plugins, reports)
        _check_this_process()
        with self._or_nothing():
            self._gpus = visible_gpus()
            machine = [this_machine(self.config.cpus, self._gpus)]
            check_fits(places, machine, label="this machine")
            kind = device_kind(machine)
            bundles = bundles_of(places, kind)
            nodes = assign(bundles, machine)
            self._bundles = [b.devices for b in bundles]
            self._logs = self._reports / LOGS if self.config.reports is not None or reports is not None else None
            self._reserved_devices = ReservedDevices(
                self._calls, allocate(places, bundles, nodes), nodes, kind == "GPU"
            )

    def shutdown(self) -> None:
        with ExitStack() as last_first:
            last_first.callback(self._printer.close)
            self._end_workers(last_first)

    def _start(self, allocations: Mapping[str, Allocation]) -> list[WorkerHandle]:
        members: list[WorkerHandle] = []
        for name, allocation in allocations.items():
            threads = os.environ.get("OMP_NUM_THREADS") or str(allocation.threads)
            env = {"OMP_NUM_THREADS": threads, **self.config.env}
            log, path = open_log(self._logs, name)
            if self.config.show_output:
                self._printer.add(name, path)
            members.append(WorkerProcess(name, self._calls, env, gpus_of(allocation, self._bundles, self._gpus), log))
            members[-1].facts = {"stderr": path}  # _describe() keeps it; the error of a failed start quotes this file
            self._running.append(members[-1])
        self._describe(members)
        for member in members:
            if (problem := member.facts["problem"]) is not None:
                raise problem.error(member.name, "describe", WorkerError)
        return members


def _check_this_process() -> None:
    """Raises ConfigError if processes cannot be supervised or memory cannot be shared. Also raises it in a process that
    torchrun started: a run has one driver, but under torchrun every process would be one."""
    if sys.platform != "linux":
        raise ConfigError(
            f"launcher 'processes' needs Linux, but this is {sys.platform}. Use --launcher.use ray, or local."
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ranks = os.environ.get("WORLD_SIZE", "several")
        raise ConfigError(
            f"this process is rank {os.environ.get('RANK', '?')} of {ranks} that torchrun started, and launcher "
            "'processes' starts ranks and engines itself: every process of torchrun would start a whole run. Start "
            "`rlhf train` once, without torchrun; for several machines use --launcher.use ray."
        )


# ------------------------------------------------------------------------------------------ devices


def visible_gpus() -> list[str]:
    """Ids of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES. Creates no CUDA context."""
    import torch

    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    if visible_devices is None:
        return [str(n) for n in range(count)]
    return [part.strip() for part in visible_devices.split(",") if part.strip()][:count]


def this_machine(cpus: int | None, gpus: Sequence[str]) -> ClusterNode:
    """The devices of this machine: its GPUs, otherwise CPU cores.

    Args:
        cpus: number of CPU cores; None: those that this process may use.

    Raises ConfigError if ``cpus`` is set on a machine with GPUs, where cores are not counted.
    """
    if gpus and cpus is not None:
        raise ConfigError(
            f"launcher.cpus = {cpus}: ranks and engines are placed on the {len(gpus)} GPUs of this machine, and CPU "
            'cores are not counted. Remove launcher.cpus, or hide the GPUs with CUDA_VISIBLE_DEVICES="".'
        )
    if gpus:  # at least one core per rank, for check_fits; cores are not reserved
        return ClusterNode("here", "this machine", {"CPU": float("inf"), "GPU": float(len(gpus))})
    return ClusterNode("here", "this machine", {"CPU": float(cpus or allowed_cores())})


def gpus_of(allocation: Allocation, bundles: Sequence[int], gpus: Sequence[str]) -> list[str] | None:
    """The GPU ids of one worker; None without GPUs.

    Args:
        bundles: number of devices of each bundle. The GPUs are assigned to the bundles in order.
        gpus: ids of the GPUs of this machine.
    """
    if not gpus:
        return None
    return [gpus[sum(bundles[:bundle]) + index] for bundle, index in allocation.slots]
