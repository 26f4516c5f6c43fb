"""Peak memory of a process."""

from __future__ import annotations

import sys


def peak_memory() -> dict[str, int]:
    """Peak values since this process started, in bytes. ``process``: resident memory. ``cuda``, if torch uses a GPU
    here: memory allocated by torch on the GPU with the highest peak."""
    peaks = {"process": _resident()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peaks["cuda"] = max(torch.cuda.max_memory_allocated(n) for n in range(torch.cuda.device_count()))
    return peaks


def _resident() -> int:
    try:  # the kernel's ru_maxrss of a child begins with that of its parent
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
