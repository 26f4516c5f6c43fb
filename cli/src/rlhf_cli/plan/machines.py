"""The machine that a run is planned for: from flags, or the one this process runs on."""

from __future__ import annotations

from pathlib import Path

from rlhf.errors import ConfigError

from rlhf_cli.plan.layout import Machine
from rlhf_cli.plan.units import parse


def target(
    device: str | None = None,
    memory: str | None = None,
    host_memory: str | None = None,
    devices_per_node: int = 8,
) -> Machine:
    """The machine of the flags.

    Args:
        device: ``cpu`` | ``cuda``; None: a GPU where ``memory`` is given or torch sees one, else a CPU.
        memory: of one device, on CPUs of the host, e.g. ``80GiB``. None: what this machine has.
        host_memory: of the host of ``devices_per_node`` GPUs.

    Raises ConfigError if a size cannot be read or a flag does not fit the device.
    """
    if devices_per_node < 1:
        raise ConfigError(f"--devices-per-node {devices_per_node}: at least 1")
    gpu = gpu_memory()
    if device is None:
        device = "cuda" if memory is not None or gpu is not None else "cpu"
    if device == "cpu" and host_memory is not None:
        raise ConfigError("--host-memory applies to nodes with GPUs; on a CPU --device-memory is the host's")
    own = gpu if device == "cuda" else cpu_memory()
    size = own if memory is None else parse(memory, "--device-memory")
    host = None if host_memory is None else parse(host_memory, "--host-memory")
    return Machine(device, size, host, devices_per_node)


def gpu_memory() -> int | None:
    """Bytes of the first GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def cpu_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of this host, or the limit of this process's cgroup; None if neither is known."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total = int(lines["MemTotal"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            total = min(total, int((cgroup / name).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return total
