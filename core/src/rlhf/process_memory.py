"""Peak memory of a process."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_memory() -> dict[str, int]:
    """Peak values since this process started, in bytes. ``process``: resident memory. ``cuda``, if torch uses a GPU
    here: memory allocated by torch on the GPU with the highest peak."""
    peaks = {"process": resident()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peaks["cuda"] = max(torch.cuda.max_memory_allocated(n) for n in range(torch.cuda.device_count()))
    return peaks


def resident(status: Path = STATUS) -> int:
    """Peak of the resident memory in bytes. ``status`` is an argument, so that tests can give another file."""
    # The first choice, because the kernel's ru_maxrss of a child begins with that of its parent. gVisor has no VmHWM.
    with contextlib.suppress(OSError), status.open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
