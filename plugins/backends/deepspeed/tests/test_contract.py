"""The conformance suite of trainers, on one rank."""

import pytest
from rlhf_plugin_deepspeed.trainer import DeepSpeedTrainer
from rlhf_testing.trainer import TrainerContract

Config = DeepSpeedTrainer.Config


class TestDeepSpeedTrainer(TrainerContract):
    trainer = DeepSpeedTrainer
    configs = (
        Config(lr=1e-3, stage=2, logits_chunk=200, schedule="cosine", ema_decay=0.9, weight_decay=0.1),
        Config(lr=1e-3, stage=3, keep_whole=40, ema_decay=0.9),
    )


@pytest.mark.full
class TestDeepSpeedTrainerWithoutPartition(TrainerContract):
    """Nothing is divided. In ``make test`` the two ranks show stage 0 (``test_two_ranks``)."""

    trainer = DeepSpeedTrainer
    configs = (Config(lr=1e-3, stage=0),)
