"""The module that DeepSpeed wraps. One call is one micro-batch, and inside it every rank makes the same calls.

ZeRO-3 gathers weights in hooks around modules, and hangs if ranks call different modules. The number of chunks of
logits depends on the tokens of a micro-batch, so the head must not be called as a module per chunk. :class:`Outputs` is
called once, keeps the head's weights for all chunks (including chunks that are recomputed in the backward pass), and
computes the products itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rlhf.ops.batch import Batch
from rlhf.types import Head
from rlhf_modeling.adapters import NAME, adapted
from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.packed_model import PackedModel
from torch import Tensor, nn
from torch.nn import functional as F


class Outputs(nn.Module):
    """Computes outputs from hidden states. The head's parameters belong to the model, not to this module."""

    def __init__(self, packed: PackedModel) -> None:
        super().__init__()
        self._packed = (packed,)  # a tuple, so that it does not become a submodule

    def forward(
        self, hidden_MH: Tensor, place_N: Tensor | None, batch: Batch, outputs: Sequence[Head]
    ) -> dict[str, Tensor]:
        """See :meth:`rlhf_modeling.packed_model.PackedModel.outputs_of`."""
        (packed,) = self._packed
        head = packed.loaded_model.head

        def product(hidden_CH: Tensor) -> Tensor:
            return F.linear(hidden_CH, head.weight, head.bias)

        return packed.outputs_of(hidden_MH, place_N, batch, outputs, product)


class EngineModule(PackedModel):
    """Body and outputs. Autocast is inside the module, because DeepSpeed's engine changes it outside."""

    def __init__(self, model: LoadedModel, config: TrainingConfig) -> None:
        super().__init__(model, config)
        self.outputs = Outputs(self)

    def forward(self, batch: Batch, outputs: Sequence[Head], bf16: bool = False) -> dict[str, Tensor]:
        """{output: [A, ...]}, fp32."""
        with torch.autocast(batch.ids_N.device.type, torch.bfloat16, enabled=bf16):
            return self.outputs(*self.hidden_states(batch), batch, outputs)

    def gather_outside(self) -> None:
        """Gather parameters that are read outside of the calls of their own module. Stage 3 gathers them only around
        these calls. Outside, :class:`Outputs` reads the head's parameters, a recurrent layer reads those of its
        convolution, and DoRA reads those of a layer with an adapter, to compute the length of its rows."""
        from deepspeed.runtime.zero import register_external_parameter

        model = self.loaded_model
        for parameter in model.head.parameters():
            register_external_parameter(self.outputs, parameter)
        for _, adapted_layer in adapted(model.module):
            for dora in adapted_layer.lora_magnitude_vector.values():
                parts = (adapted_layer.base_layer, adapted_layer.lora_A[NAME], adapted_layer.lora_B[NAME])
                for parameter in (part.weight for part in parts):
                    register_external_parameter(dora, parameter)
        for layer in model.module.modules():
            for child in layer.children():
                for parameter in child.parameters() if isinstance(child, nn.Conv1d) else ():
                    register_external_parameter(layer, parameter)


@contextmanager
def sparing_linear(enabled: bool) -> Iterator[None]:
    """Context in which linear layers save their weight for the backward pass instead of autocast's copy. The copies
    would keep the whole model gathered in bf16 until then. DeepSpeed's option for this replaces torch's function in the
    whole process."""
    if not enabled:
        yield
        return
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    functional: Any = torch.nn.functional
    original = functional.linear
    functional.linear = zero3_linear_wrap
    try:
        yield
    finally:
        functional.linear = original
