"""Options that all trainers of several ranks have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_modeling.config import TrainingConfig


class ShardedConfig(TrainingConfig):
    timeout: float = Field(1800.0, gt=0)
    """Seconds that a rank waits for the others before it raises. On GPUs NCCL ends the process instead; what the rank
    was doing is on its standard error."""
    sequence_parallel: int = Field(1, ge=1)
    """This many neighbouring ranks divide the tokens of every micro-batch among them: each computes its part, and
    attention for some heads of the whole. A divisor of the number of ranks and of the model's attention heads."""
    export_shard_bytes: int = Field(2**32, gt=0)
    """Largest safetensors file of an export (one larger tensor is alone in its file)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; ``auto``: a GPU if there is one."""
