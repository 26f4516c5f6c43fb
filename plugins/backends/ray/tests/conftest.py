"""One Ray for the tests of a module, and what they launch on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rlhf_plugin_ray.cluster import Cluster
from rlhf_plugin_ray.config import RayConfig
from rlhf_plugin_ray.launcher import RayLauncher

HERE = os.path.dirname(__file__)
sys.path.insert(0, HERE)  # for the stand-ins


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """4 CPUs by Ray's count, on this machine only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", HERE)  # of the workers
        made = Cluster(RayConfig(cpus=4, object_store_gib=0.25))
        yield made
        made.close()


@pytest.fixture
def launch(cluster: Cluster) -> Iterator[Callable[..., RayLauncher]]:
    """``launch(**options)``: a launcher that is shut down after the test."""
    made: list[RayLauncher] = []

    def make(**options: Any) -> RayLauncher:
        made.append(RayLauncher(RayConfig(**options)))
        return made[-1]

    yield make
    for launcher in made:
        launcher.shutdown()
