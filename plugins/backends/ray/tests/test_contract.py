"""The conformance suite, on a real Ray."""

from __future__ import annotations

import pytest
from rlhf_plugin_ray.launcher import RayLauncher
from rlhf_testing.launcher import LauncherContract


@pytest.mark.usefixtures("cluster")
class TestRayLauncher(LauncherContract):
    launcher = RayLauncher
    world_sizes = (1, 2)
