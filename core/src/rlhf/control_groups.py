"""Memory and processor cores that this process may use: the machine's, limited by its control groups.

Standard library only: `make quickstart` runs this file before anything is installed. The paths that a function reads
are arguments, so that tests can give other paths.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of main memory."""

    total: int
    available: int
    """Memory that is still available to programs."""
    limit: int | None
    """The smallest limit of this process's control groups; None: no limit is below ``total``."""


def machine_memory(root: Path = ROOT, membership: Path = MEMBERSHIP, meminfo: Path = MEMINFO) -> MachineMemory | None:
    """Memory of the machine; None if the system does not report it."""
    lines = dict(line.split(":", 1) for line in _text(meminfo).splitlines() if ":" in line)
    if not {"MemTotal", "MemAvailable"} <= lines.keys():
        return None
    total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    folders = [*_groups("memory", root, membership)]
    texts = [_text(folder / name) for folder in folders for name in ("memory.max", "memory.limit_in_bytes")]
    limits = [int(text) for text in texts if text and text.strip() != "max"]
    return MachineMemory(total, available, min((limit for limit in limits if limit < total), default=None))


def cpu_limit(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float | None:
    """The smallest limit of processor time of this process's control groups, in cores; None: no limit."""
    limits = []
    for folder in _groups("cpu", root, membership):
        words = _text(folder / "cpu.max").split()
        words = words or [*_text(folder / "cpu.cfs_quota_us").split(), *_text(folder / "cpu.cfs_period_us").split()]
        if len(words) == 2 and words[0] not in ("max", "-1"):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def usable_cores(root: Path = ROOT, membership: Path = MEMBERSHIP) -> int:
    """Number of cores that this process may keep busy: the smaller of the cores that it may run on and its limit of
    processor time."""
    limit = cpu_limit(root, membership)
    return allowed_cores() if limit is None else min(allowed_cores(), max(1, int(limit)))


def allowed_cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The folders of this process's control groups (of version 2, and of the controller of version 1) and of their
    parents. In a container some of them may not be visible."""
    lines = [line.split(":", 2) for line in _text(membership).splitlines()]
    # The root of each hierarchy comes first: in a container it is often the group of the process, although the path in
    # `membership` is that of the host.
    for _, controllers, path in [("", "", "/"), ("", controller, "/"), *lines]:
        if controllers and controller not in controllers.split(","):
            continue
        for mount in (root / controllers, root / controller) if controllers else (root,):
            folder = mount / path.lstrip("/")
            yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(mount)))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
