"""The conformance suite."""

from __future__ import annotations

from rlhf_plugin_processes.launcher import ProcessesLauncher
from rlhf_plugin_processes.torchrun.launcher import TorchrunLauncher
from rlhf_testing.launcher import LauncherContract
from torchrun_machines import MachinesLauncher


class TestProcessesLauncher(LauncherContract):
    launcher = ProcessesLauncher
    world_sizes = (1, 2)


class TestTorchrunLauncher(LauncherContract):
    launcher = MachinesLauncher
    world_sizes = (1, 3)

    def test_entry_point(self) -> None:  # of the launcher without the machines of the tests
        class Offered(LauncherContract):
            launcher = TorchrunLauncher

        Offered().test_entry_point()
