"""Trainers of the tests."""

from __future__ import annotations

from typing import Any

from rlhf.interfaces import ModelSpec
from rlhf_plugin_fsdp.trainer import FsdpTrainer
from rlhf_plugin_local.trainer import TorchTrainer


def trainer(model_spec: ModelSpec, **options: Any) -> FsdpTrainer:
    return FsdpTrainer(FsdpTrainer.Config(**{"lr": 1e-3, "device": "cpu", "timeout": 120.0, **options}), model_spec)


def one_rank(model_spec: ModelSpec, **options: Any) -> TorchTrainer:
    return TorchTrainer(TorchTrainer.Config(**{"lr": 1e-3, "device": "cpu", **options}), model_spec)
