"""Options of the trainer ``torch``: the run file's ``[trainer]`` section."""

from __future__ import annotations

from typing import Literal

from rlhf_modeling.config import TrainingConfig


class TorchTrainerConfig(TrainingConfig):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; ``auto``: a GPU if there is one."""
