"""Finds leaks of this process: open files, child processes, threads.

A leak grows with every use. Objects that a library keeps after its first use, such as a cache or a pool, are not a
leak.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Held = dict[str, dict[Any, str]]
"""{kind: {identity of an object: its description}}."""

WARM = 2
"""Number of uses before the first measurement."""
USES = 3
"""Largest number of measured uses. A leak must grow in each use, so the measurement stops at the first use in which no
kind grows."""


def open_resources() -> Held:
    """The held objects by ``open files``, ``child processes`` and ``threads``. A kind that this system does not report
    is left out."""
    objects: Held = {"threads": {thread.ident: thread.name for thread in threading.enumerate()}}
    for kind, reader in (("open files", _files), ("child processes", _children)):
        if (items := reader()) is not None:
            objects[kind] = items
    return objects


def leaks(uses: Sequence[Callable[[], object]]) -> list[list[str]]:
    """For each of ``uses``: one line for each kind of object that every call leaves behind.

    Args:
        uses: their return values are kept to the end, so that garbage collection does not hide a leak. The garbage
            collector runs once for all of them, because it takes a second in a process with many imports.
    """
    results = [use() for use in uses for _ in range(WARM)]
    gc.collect()
    return [_leaks(use, results) for use in uses]


def _leaks(use: Callable[[], object], results: list[object]) -> list[str]:
    last = open_resources()
    left: dict[str, list[list[str]]] = {}
    for _ in range(USES):
        results.append(use())
        current = open_resources()
        for kind in current:
            opened = [words for key, words in current[kind].items() if key not in last.get(kind, {})]
            fewer = [key for key in last.get(kind, {}) if key not in current[kind]]
            left.setdefault(kind, []).append(opened if len(opened) > len(fewer) else [])
        if not any(all(records) for records in left.values()):
            return []
        last = current
    return [f"{kind}: {', '.join(records[-1])}" for kind, records in left.items() if all(records)]


def _files() -> dict[Any, str] | None:
    for folder in (Path("/proc/self/fd"), Path("/dev/fd")):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        files: dict[Any, str] = {}
        for name in names:
            try:
                files[int(name), os.fstat(int(name)).st_ino] = _target(folder / name)
            except (OSError, ValueError):  # the descriptor of the folder itself, which is closed by now
                continue
        return files
    return None


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return link.name


def _children() -> dict[Any, str] | None:
    """Child processes, including those that ended and were not waited for."""
    parent_id, processes = os.getpid(), dict[Any, str]()
    try:
        numbers = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return None
    for number in numbers:
        try:
            name, rest = Path("/proc", number, "stat").read_text().rsplit(")", 1)
        except (OSError, ValueError):
            continue
        state, parent = rest.split()[:2]
        if int(parent) == parent_id:
            status = " (ended, not waited for)" if state == "Z" else ""
            processes[int(number)] = f"{name.split('(', 1)[-1]} {number}{status}"
    return processes
