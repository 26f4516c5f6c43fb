"""The conformance suite."""

from __future__ import annotations

from rlhf_plugin_processes.launcher import ProcessesLauncher
from rlhf_testing.launcher import LauncherContract


class TestProcessesLauncher(LauncherContract):
    launcher = ProcessesLauncher
    world_sizes = (1, 2)
