"""The conformance suites of trainers, on one rank, and of backends."""

import pytest
from rlhf_plugin_fsdp import FsdpBackend
from rlhf_plugin_fsdp.trainer import FsdpTrainer
from rlhf_testing.backend import BackendContract
from rlhf_testing.trainer import TrainerContract

Config = FsdpTrainer.Config


class TestFsdpTrainer(TrainerContract):
    trainer = FsdpTrainer
    configs = (Config(lr=1e-3, logits_chunk=200, schedule="cosine", ema_decay=0.9, weight_decay=0.1),)


@pytest.mark.full
class TestFsdpTrainerThatKeepsLayers(TrainerContract):
    trainer = FsdpTrainer
    configs = (Config(lr=1e-3, reshard_after_forward=False, ema_decay=0.9),)


class TestFsdpBackend(BackendContract):
    backend = FsdpBackend
