"""Freed memory stays with the process, where nobody chose otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
from rlhf.modeling.host_memory import CHOSEN

FAULTS = """
import ctypes, resource
from rlhf.modeling.host_memory import keep_freed
print(keep_freed())
libc, size = ctypes.CDLL(None), 30 * 2**20
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
blocks = [0] * 8
for step in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for i in range(8):
        blocks[i] = libc.malloc(size)
    for i in range(8):
        libc.memset(blocks[i], 1, size)
    for i in range(7, -1, -1):
        libc.free(blocks[i])
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Eight blocks of 30 MiB: 61440 pages."""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")


def faults(**chosen: str) -> tuple[str, int]:
    """(whether it was done, pages that the last of six equal steps had to fault in)."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOSEN} | chosen
    words = [sys.executable, "-c", FAULTS]
    done, count = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return done, int(count)


def test_what_is_freed_is_taken_again() -> None:
    done, count = faults()
    assert done == "True"
    assert count < 6_000


def test_a_choice_of_the_environment_stands() -> None:
    done, count = faults(GLIBC_TUNABLES="glibc.malloc.check=0")
    assert done == "False"
    assert count > 30_000
