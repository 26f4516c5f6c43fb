"""Limits of the control groups of a process, in a job or a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rlhf.control_groups import cpu_limit, machine_memory, usable_cores

GIB = 2**30
MEMINFO = f"MemTotal: {8 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {6 * 2**20} kB\n"


def limit(folder: Path, membership: str, **files: str) -> int | None:
    """The limit of memory of a process of these control groups. ``files``: {group: content of its file}, with __ for
    / and no name for the root."""
    (folder / "meminfo").write_text(MEMINFO)
    (folder / "membership").write_text(membership)
    for group, text in files.items():
        place = folder / "fs" / group.replace("__", "/")
        place.mkdir(parents=True, exist_ok=True)
        (place / ("memory.limit_in_bytes" if group.startswith("memory") else "memory.max")).write_text(text)
    memory = machine_memory(folder / "fs", folder / "membership", folder / "meminfo")
    assert memory is not None
    assert (memory.total, memory.available) == (8 * GIB, 6 * GIB)
    return memory.limit


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"": f"{GIB}\n"}, GIB),
        ("0::/\n", {"": "max\n"}, None),
        ("0::/job/step\n", {"job": f"{3 * GIB}\n", "job__step": "max\n"}, 3 * GIB),
        ("0::/job/step\n", {"job": f"{3 * GIB}\n", "job__step": f"{2 * GIB}\n"}, 2 * GIB),
        ("0::/job\n", {"other": f"{GIB}\n"}, None),
        ("4:memory:/job/step\n0::/\n", {"memory__job": f"{GIB}\n", "memory__job__step": f"{9 * GIB}\n"}, GIB),
        ("4:memory:/docker/id\n1:cpu:/\n", {"memory": f"{GIB}\n"}, GIB),
        ("4:memory:/job\n3:cpuset:/other\n", {"memory__other": f"{GIB}\n", "memory": f"{2**63 - 4096}\n"}, None),
    ],
)
def test_the_smallest_limit_of_a_group_and_those_above_it(
    tmp_path: Path, membership: str, files: dict[str, str], expected: int | None
) -> None:
    assert limit(tmp_path, membership, **files) == expected


def test_a_system_that_does_not_say_its_memory(tmp_path: Path) -> None:
    assert machine_memory(tmp_path, tmp_path / "absent", tmp_path / "absent") is None


def test_processor_time_of_version_1(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("2:cpu,cpuacct:/job\n")
    for group, quota in {"cpu": "200000\n", "cpu,cpuacct/job": "150000\n"}.items():
        (tmp_path / group).mkdir(parents=True)
        (tmp_path / group / "cpu.cfs_quota_us").write_text(quota)
        (tmp_path / group / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_limit(tmp_path, tmp_path / "absent") == 2
    assert cpu_limit(tmp_path, tmp_path / "membership") == 1.5
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_limit(tmp_path, tmp_path / "absent") is None


@pytest.mark.parametrize(("quota", "cores"), [("max", 4), ("900000", 4), ("250000", 2), ("50000", 1)])
def test_cores_are_those_of_which_the_process_gets_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 4, 6}, raising=False)
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
    assert usable_cores(tmp_path, tmp_path / "absent") == cores
