"""Options of the generator ``vllm``: the run file's ``[generator]`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from rlhf.interfaces.component import ComponentConfig


class VllmGeneratorConfig(ComponentConfig):
    """What a platform cannot do is refused when the engine is built (``platforms.py``)."""

    tensor_parallel: int = Field(1, ge=1)
    """Workers that one layer is divided over. On a CPU each takes an equal share of the processor's cores."""
    pipeline_parallel: int = Field(1, ge=1)
    """Groups of workers that the layers are divided over; GPUs only."""
    memory_share: float | None = Field(None, gt=0, le=1)
    """Part of each GPU's memory that the engine takes in all; absent: 0.9. GPUs only."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """GiB of key-value cache per worker; absent: 1 on a CPU, what ``memory_share`` leaves on a GPU."""
    eager: bool | None = None
    """Run the model as it is (``true``) or compiled, on a GPU with captured graphs (``false``); absent: as it is on a
    CPU, compiled on a GPU."""
    prefix_caching: bool = True
    """Keys and values of prompts that begin alike are computed once, in whole blocks (of 128 tokens on a CPU)."""
    max_sequences: int = Field(256, ge=1)
    """Samples drawn at once; further requests wait, in order."""
    max_batched_tokens: int | None = Field(None, ge=1)
    """Tokens of one forward pass; absent: 8192, or the longest sequence where that is more. A CPU does not cut a
    prompt in pieces, so there it must hold the longest sequence."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Weights and arithmetic of sampling; ``auto``: the policy's."""
    sleep_level: Literal[1, 2] = 1
    """What sleeping does with the weights: 1 moves them to host memory, 2 forgets them (they come back with the next
    sync). GPUs only."""

    @model_validator(mode="after")
    def _consistent(self) -> VllmGeneratorConfig:
        if self.memory_share is not None and self.kv_cache_gib is not None:
            raise ValueError(
                "memory_share and kv_cache_gib both decide the size of the cache: give one of them (kv_cache_gib is "
                "exact)"
            )
        if self.max_batched_tokens is not None and self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"max_batched_tokens = {self.max_batched_tokens} holds fewer tokens than max_sequences = "
                f"{self.max_sequences} samples add in a step: raise it, or lower max_sequences"
            )
        return self
