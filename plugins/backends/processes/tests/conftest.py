"""Launchers for the suites of `libraries/workers/tests`. Workers get the import path of the driver."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rlhf_plugin_processes.launcher import ProcessesConfig, ProcessesLauncher

HERE = Path(__file__).parent
SHARED = HERE.parents[3] / "libraries" / "workers" / "tests"
sys.path[:0] = [str(HERE), str(SHARED)]
for suite in SHARED.glob("suite_*.py"):
    pytest.register_assert_rewrite(suite.stem)


@pytest.fixture(scope="module")
def make_launcher() -> Callable[..., ProcessesLauncher]:
    """``make_launcher(**options)``: a launcher that counts four CPUs, whatever this machine has."""
    return lambda **options: ProcessesLauncher(ProcessesConfig(cpus=4, **options))


@pytest.fixture
def launch(make_launcher: Callable[..., ProcessesLauncher]) -> Iterator[Callable[..., ProcessesLauncher]]:
    """``launch(**options)``: a launcher that is shut down after the test."""
    launchers: list[ProcessesLauncher] = []

    def make(**options: Any) -> ProcessesLauncher:
        launchers.append(make_launcher(**options))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.shutdown()
