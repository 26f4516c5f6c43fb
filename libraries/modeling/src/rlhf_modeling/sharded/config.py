"""Options that all trainers of several ranks have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_modeling.config import TrainingConfig


class ShardedConfig(TrainingConfig):
    timeout: float = Field(1800.0, gt=0)
    """Seconds that a rank waits for the others before it raises an error. On GPUs NCCL ends the process instead, and
    the rank's standard error shows what it was doing."""
    sequence_parallel: int = Field(1, ge=1)
    """Number of neighbouring ranks that split the tokens of every micro-batch. Each rank computes its part, and
    attention over all tokens for some heads. A divisor of the number of ranks and of the model's attention heads."""
    export_shard_bytes: int = Field(2**32, gt=0)
    """Largest safetensors file of an export (a larger tensor gets a file of its own)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model; ``auto``: a GPU if there is one."""
