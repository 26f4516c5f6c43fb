"""Options of the trainer ``deepspeed``: the run file's ``[trainer]`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator
from rlhf_modeling.sharded.config import ShardedConfig


class DeepSpeedTrainerConfig(ShardedConfig):
    stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage: what is divided over the ranks. 0: nothing, 1: the optimizer state, 2: also gradients, 3: also
    weights."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of neighbouring ranks that split each layer and compute the same micro-batches. Stages 0 to 2. A divisor
    of the number of ranks, of the model's heads and of its feed-forward width."""
    offload_optimizer: Literal["none", "cpu"] = "none"
    """Device of the optimizer's state, weights, gradients and computation. Stages 1 to 3."""
    offload_params: Literal["none", "cpu"] = "none"
    """Device of a rank's part of the weights while no layer needs it. Stage 3, with ``offload_optimizer``: the
    optimizer steps the weights where they are."""
    hpz_partition_size: int = Field(1, ge=1)
    """ZeRO++: number of ranks (of one node) that together hold a second copy of the weights, so that the backward pass
    gathers inside the node. Stage 3. A divisor of the number of ranks; 1: no copy."""
    keep_whole: int = Field(100_000, ge=0)
    """Stage 3: parameters of up to this many elements stay whole on every rank."""
    gathered: int = Field(2**27, ge=0)
    """Stage 3: largest number of elements that a rank keeps whole between two uses, besides those of the current
    layer. A larger number saves communication, a smaller one saves memory."""
    bucket: int = Field(2**25, gt=0)
    """Elements of the buffers in which gradients are reduced and, in stage 3, weights gathered ahead of use."""

    @model_validator(mode="after")
    def _possible(self) -> DeepSpeedTrainerConfig:
        if self.offload_optimizer != "none" and self.stage == 0:
            raise ValueError("offload_optimizer needs stage 1, 2 or 3: stage 0 keeps the optimizer beside the weights")
        for name in ("offload_params", "hpz_partition_size", "keep_whole", "gathered"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and self.stage != 3:
                raise ValueError(f"{name} = {value!r} needs stage 3, where weights are divided; stage is {self.stage}")
        if self.offload_params != "none" and self.offload_optimizer == "none":
            raise ValueError(
                f"offload_params = {self.offload_params!r} needs offload_optimizer = {self.offload_params!r}: the "
                "optimizer updates the weights where they are stored"
            )
        if self.tensor_parallel > 1:
            for name, wrong, cause in (
                (
                    f"sequence_parallel = {self.sequence_parallel}",
                    self.sequence_parallel > 1,
                    "divides the same heads over ranks; set one of them to 1",
                ),
                ("stage = 3", self.stage == 3, "already divides every weight by its elements; use stage 0, 1 or 2"),
                (
                    "lora.dropout",
                    self.lora is not None and self.lora.dropout > 0,
                    "would draw the same mask on every rank, for different parts of a layer; set it to 0",
                ),
                (
                    "lora.use_dora",
                    self.lora is not None and self.lora.use_dora,
                    "needs the length of whole rows of a weight, but each rank has a part of them; set it to false",
                ),
                (
                    "neftune_alpha",
                    self.neftune_alpha is not None,
                    "would add different noise to the embeddings of each rank; remove one of the two options",
                ),
            ):
                if wrong:
                    raise ValueError(
                        f"tensor_parallel = {self.tensor_parallel} cannot be combined with {name}, which {cause}"
                    )
        if (option := self.quantizes) is not None and (self.stage == 3 or self.tensor_parallel > 1):
            other = "stage = 3" if self.stage == 3 else f"tensor_parallel = {self.tensor_parallel}"
            raise ValueError(
                f"{option} cannot be combined with {other}: a quantised weight is whole on every rank. Use stage 0, "
                "1 or 2 and tensor_parallel = 1"
            )
        if self.kernels == "own" and self.stage == 3:
            raise ValueError(
                "kernels = 'own' cannot be combined with stage 3: fused layers read weights without ZeRO's knowledge"
            )
        return self
