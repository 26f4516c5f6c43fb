"""The conformance suites of trainers, generators and launchers."""

from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.generator import GeneratorContract
from rlhf_testing.launcher import LauncherContract
from rlhf_testing.trainer import TrainerContract


class TestTorchTrainer(TrainerContract):
    trainer = TorchTrainer
    architectures = ("qwen3", "llama")
    configs = (
        TorchTrainer.Config(lr=1e-3),
        TorchTrainer.Config(lr=1e-3, logits_chunk=200, schedule="cosine", ema_decay=0.9, weight_decay=0.1),
    )


class TestTransformersGenerator(GeneratorContract):
    generator = TransformersGenerator
    architectures = ("qwen3", "llama")
    configs = (TransformersGenerator.Config(), TransformersGenerator.Config(max_batch=2, prefill_tokens=4))


class TestLocalLauncher(LauncherContract):
    launcher = LocalLauncher
    world_sizes = (1,)
