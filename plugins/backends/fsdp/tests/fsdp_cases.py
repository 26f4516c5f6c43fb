"""Trainers of the tests."""

from __future__ import annotations

from typing import Any

from rlhf.interfaces import ModelSpec
from rlhf_plugin_fsdp.trainer import FsdpTrainer
from rlhf_plugin_local.trainer import TorchTrainer


def trainer(of: ModelSpec, **options: Any) -> FsdpTrainer:
    return FsdpTrainer(FsdpTrainer.Config(**{"lr": 1e-3, "device": "cpu", "timeout": 120.0, **options}), of)


def one_rank(of: ModelSpec, **options: Any) -> TorchTrainer:
    return TorchTrainer(TorchTrainer.Config(**{"lr": 1e-3, "device": "cpu", **options}), of)
