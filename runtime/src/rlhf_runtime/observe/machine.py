"""The hardware and software of a run: processor, memory, accelerators, versions, code revision. The names of the
machine and its user are not recorded."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "datasets", "safetensors", "pydantic", "pluggy")


def environment() -> dict[str, Any]:
    """Hardware, software versions and code revisions, for ``manifest.json``. Does not import torch and needs no
    device."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "code": {
            "rlhf": git_revision(Path(__file__).parent),
            "working_directory": git_revision(Path.cwd()),
        },
    }


def git_revision(folder: Path) -> str | None:
    """Commit of the git repository that contains ``folder``, with ``+changes`` where tracked files differ. None outside
    of a repository, and for a package in ``site-packages``."""
    if "site-packages" in folder.parts:
        return None
    revision = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if not revision:
        return None
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return revision + ("+changes" if changed else "")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _gpus() -> list[str]:
    """Names and memory as the driver reports them; asking torch would start CUDA in this process."""
    text = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """A program's output. Empty where the program is not installed, fails or hangs: none of these may stop a run."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.strip() if process.returncode == 0 else ""
