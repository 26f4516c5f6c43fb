"""Options of the trainer ``fsdp``: the run file's ``[trainer]`` section."""

from __future__ import annotations

from pydantic import model_validator
from rlhf_modeling.sharded.config import ShardedConfig


class FsdpTrainerConfig(ShardedConfig):
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass and gather them again for its backward pass. ``false``
    gathers once per micro-batch and holds all weights whole until the backward pass."""

    @model_validator(mode="after")
    def _possible(self) -> FsdpTrainerConfig:
        if self.kernels == "liger":
            raise ValueError(
                "kernels = 'liger' does not go with trainer 'fsdp': the comparison with transformers' layers needs a "
                "whole model on the GPU. Leave kernels out, or use trainer 'deepspeed'"
            )
        if (option := self.quantizes) is not None:
            raise ValueError(
                f"{option} does not go with trainer 'fsdp', which divides weights: a quantised weight is whole "
                "on every rank. Leave it out, or use trainer 'torch', or 'deepspeed' with stage 0, 1 or 2"
            )
        return self
