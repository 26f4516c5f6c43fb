"""The conformance suite, on a real Ray."""

from __future__ import annotations

import pytest
from rlhf.testing.launcher import LauncherContract
from rlhf_plugin_ray.launcher import RayLauncher


@pytest.mark.usefixtures("cluster")
class TestRayLauncher(LauncherContract):
    launcher = RayLauncher
    world_sizes = (1, 2)
