"""Memory of this process on a CPU: what one step frees, the next takes again.

glibc gives the end of its heap back to the kernel when it is free, so every step faults the pages of its activations in
anew: for the small models that train on a CPU, some hundredths of a step. Blocks of 32 MiB and more are mapped one by
one and given back, as they are by default: in the heap they would leave holes.
"""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Of glibc's malloc.h."""
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Variables by which whoever started the process has chosen for himself."""


def keep_freed() -> bool:
    """Keep the heap as large as it once was. Returns whether that was done: with glibc, and where the environment says
    nothing of it.

    The most that the process holds does not change; between its peaks it holds more. For a process that has its memory
    to itself, then: one that shares a machine with others of the run should give back.
    """
    if platform.libc_ver()[0] != "glibc" or any(os.environ.get(name) for name in CHOSEN):
        return False
    largest = 2**31 - 1  # it takes a C int
    libc = ctypes.CDLL(None)
    # A threshold that is set stays: 32 MiB is where glibc's own ends up, and 128 KiB where it would stay.
    settings = ((M_MMAP_THRESHOLD, 2**25), (M_TRIM_THRESHOLD, largest), (M_TOP_PAD, 2**26))
    return all(libc.mallopt(what, value) for what, value in settings)
