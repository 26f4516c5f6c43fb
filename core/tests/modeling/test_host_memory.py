"""Freed memory stays with the process, where nobody chose otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
from rlhf.modeling.host_memory import CHOSEN

FAULTS = """
import resource, torch
from rlhf.modeling.host_memory import keep_freed
print(keep_freed())
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(2)))
for step in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model(torch.ones(20_000, 512)).square().mean().backward()  # tensors of 39 MiB: 10000 pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")


def faults(**chosen: str) -> tuple[str, int]:
    """(whether it was done, pages that the last of twelve equal steps had to fault in)."""
    environment = {name: value for name, value in os.environ.items() if name not in CHOSEN} | chosen
    words = [sys.executable, "-c", FAULTS]
    done, count = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return done, int(count)


def test_what_is_freed_is_taken_again() -> None:
    done, count = faults()
    assert done == "True"
    assert count < 20_000


def test_a_choice_of_the_environment_stands() -> None:
    done, count = faults(GLIBC_TUNABLES="glibc.malloc.check=0")
    assert done == "False"
    assert count > 60_000
