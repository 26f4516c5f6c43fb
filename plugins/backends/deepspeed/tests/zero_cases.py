"""Trainers that the tests and ranks have in common, with the batches that they train on."""

from __future__ import annotations

from typing import Any

from rlhf.interfaces import ModelSpec
from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.trainer import DeepSpeedTrainer
from rlhf_plugin_local.trainer import TorchTrainer

from tests.support.rank_batches import STEPS as STEPS
from tests.support.rank_batches import apart as apart
from tests.support.rank_batches import batch as batch
from tests.support.rank_batches import shares as shares
from tests.support.rank_batches import spec as spec


def trainer(model_spec: ModelSpec, **options: Any) -> DeepSpeedTrainer:
    """In stage 3 every parameter is divided. The learning rate is large, so that steps are visible."""
    division = {"keep_whole": 0, "gathered": 0} if options.get("stage") == 3 else {}
    settings = {"lr": 1e-3, "device": "cpu", "timeout": 120.0, **division, **options}
    return DeepSpeedTrainer(DeepSpeedTrainerConfig(**settings), model_spec)


def one_rank(model_spec: ModelSpec, **options: Any) -> TorchTrainer:
    """The trainer with which DeepSpeed's is compared."""
    return TorchTrainer(TorchTrainer.Config(**{"lr": 1e-3, "device": "cpu", **options}), model_spec)
