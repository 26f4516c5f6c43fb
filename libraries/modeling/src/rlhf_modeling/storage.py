"""Where a rank keeps the weights, gradients and optimizer state of a role, for ``rlhf plan``."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.interfaces.memory import FP32, ModelSize

from rlhf_modeling.config import TrainingConfig


@dataclass(frozen=True, slots=True)
class Storage:
    """Where a rank keeps weights, gradients and optimizer state. The default is a whole fp32 copy and AdamW.

    ``*_ranks``: number of ranks over which one copy is divided. ``*_bytes``: bytes per parameter before this division.
    """

    weight_ranks: int = 1
    weight_bytes: float = 4.0
    read_bytes: float = 0.0
    """Bytes per weight while the model is read, if more than ``weight_bytes``."""
    gradient_ranks: int = 1
    gradient_bytes: float = 4.0
    optimizer_ranks: int = 1
    optimizer_bytes: float = 8.0
    """Optimizer state, the optimizer's own copy of the weights, and a moving average."""
    matrix_saving: float = 0.0
    """Bytes per parameter that an optimizer of matrices saves on each of them (Muon: one moment instead of two)."""
    step: int = 0
    """Bytes that the optimizer's step needs temporarily."""
    layer_ranks: int = 1
    """Number of ranks that divide every layer (tensor parallel). Embedding and head are whole on each."""
    second_ranks: int = 0
    """Number of ranks over which a second copy of the weights is divided; 0: no second copy."""
    gathered: int = 0
    """Bytes of other ranks' weights that a rank holds while it computes."""
    buffers: int = 0
    """Bytes of communication buffers, whatever the model's size."""
    making_bytes: float = 0.0
    """Bytes per trained parameter that exist beside the weights while the trainer creates its buffers."""
    keeps_gradients: bool = False
    """Gradient buffers also exist between steps."""
    frees_gradients: bool = False
    """A step begins without gradients. In the backward pass of its first micro-batch, each layer's gradients are
    allocated when its activations that are no longer needed are freed."""
    whole_at_load: bool = False
    """Each rank reads the whole model in host memory and keeps its part."""
    host_weights: bool = False
    """The weights are in host memory; layers are moved to the device one by one."""
    host_optimizer: bool = False
    """Optimizer state and gradients live in host memory."""
    offloads: bool = False
    """``Offloads.offload`` moves optimizer state and gradients to host memory."""


def whole_storage(config: TrainingConfig, device: str, size: ModelSize, stored: str = "fp32") -> Storage:
    """Storage of a rank that divides nothing.

    Args:
        stored: ``fp32`` | ``bf16``, the number format of the weights; with ``bf16`` the optimizer has fp32 masters.
    """
    muon, bf16 = config.optimizer == "muon", stored == "bf16"
    return Storage(
        weight_bytes=2.0 if bf16 else 4.0,
        optimizer_bytes=8.0 + (4.0 if config.ema_decay is not None else 0.0) + (4.0 if bf16 else 0.0),
        matrix_saving=4.0 if muon else 0.0,
        step=2 * largest_matrix(size) if muon else 0,
        frees_gradients=True,
        offloads=device == "cuda",
    )


def largest_matrix(size: ModelSize) -> int:
    """Bytes of a layer's largest matrix in fp32."""
    return max(size.hidden * max(x.query, 0 if x.routed else x.ffn) for x in size.layers) * FP32
