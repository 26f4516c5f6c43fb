"""The torch trainer and the local launcher against the suites of their kinds."""

from __future__ import annotations

from rlhf.testing.launcher import LauncherContract
from rlhf.testing.trainer import TrainerContract
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.trainer import TorchTrainer


class TestTorchTrainer(TrainerContract):
    trainer = TorchTrainer
    architectures = ("qwen3", "llama")


class TestLocalLauncher(LauncherContract):
    launcher = LocalLauncher
    world_sizes = (1,)
