"""One Ray for the tests of this folder, and launchers on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rlhf_plugin_ray.cluster.connection import Cluster
from rlhf_plugin_ray.config import RayConfig
from rlhf_plugin_ray.launcher import RayLauncher

HERE = os.path.dirname(__file__)
sys.path.insert(0, HERE)
from ray_paths import PATHS, SHARED  # noqa: E402

sys.path.insert(1, str(SHARED))
for suite in SHARED.glob("suite_*.py"):
    pytest.register_assert_rewrite(suite.stem)


running: list[Cluster] = []
"""The Ray of this test process, while it runs."""


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """A Ray on this machine only, started with 4 CPUs."""
    if not running:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", PATHS, prepend=os.pathsep)  # of the workers
            running.append(Cluster(RayConfig(cpus=4, object_store_gib=0.25)))
    return running[-1]


@pytest.fixture(scope="module")
def no_cluster() -> None:
    """Ends the shared Ray, for a module that starts its own in this process."""
    if running:
        running.pop().close()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends Ray after this folder's last test, because tests of other folders start their own."""
    if running and (nextitem is None or Path(HERE) not in nextitem.path.parents):
        running.pop().close()


@pytest.fixture(scope="module")
def make_launcher(cluster: Cluster) -> Callable[..., RayLauncher]:
    """``make_launcher(**options)``: a launcher on the shared Ray."""
    return lambda **options: RayLauncher(RayConfig(**options))


@pytest.fixture
def launch(cluster: Cluster) -> Iterator[Callable[..., RayLauncher]]:
    """``launch(**options)``: a launcher that is shut down after the test."""
    launchers: list[RayLauncher] = []

    def make(**options: Any) -> RayLauncher:
        launchers.append(RayLauncher(RayConfig(**options)))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.shutdown()
