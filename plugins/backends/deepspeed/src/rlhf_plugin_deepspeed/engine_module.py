"""The module that DeepSpeed wraps. One call is one micro-batch, and inside it every rank makes the same calls.

ZeRO-3 gathers weights in hooks around modules, and hangs if ranks call different modules. The number of chunks of
logits depends on the tokens of a micro-batch, so the head must not be called as a module per chunk. :class:`Outputs` is
called once, keeps the head's weights for all chunks (including chunks that are recomputed in the backward pass), and
computes the products itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rlhf.ops.batch import Batch
from rlhf.types import Head
from rlhf_modeling import heads as head_ops
from rlhf_modeling.adapters import NAME, adapted
from rlhf_modeling.config import TrainingConfig, most_logits
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.packed_model import hidden_states, shares_prefixes
from rlhf_modeling.stored import head_product
from torch import Tensor, nn
from torch.nn import functional as F


class Outputs(nn.Module):
    """Computes outputs from hidden states. The head's parameters belong to the model, not to this module."""

    def __init__(self, model: LoadedModel, config: TrainingConfig) -> None:
        super().__init__()
        self._loaded_model, self._config = (model,), config  # a tuple, so that the head does not become a submodule

    def logits(self) -> Callable[[Tensor], Tensor]:
        """[C, H] -> [C, vocabulary] or [C, outputs of the head], while the head's weights are whole. For fp32 logits a
        head that is stored in bf16 is converted once for all chunks."""
        (model,) = self._loaded_model
        if (multiply := head_product(model.head, self._config.head_fp32)) is not None:
            return lambda hidden_CH: model.shaped(multiply(hidden_CH))
        return lambda hidden_CH: model.shaped(F.linear(hidden_CH, model.head.weight, model.head.bias))

    def forward(
        self, hidden_MH: Tensor, place_N: Tensor | None, batch: Batch, outputs: Sequence[Head]
    ) -> dict[str, Tensor]:
        """``hidden_MH``, ``place_N``: see :func:`rlhf_modeling.packed_model.hidden_states`."""
        (model,) = self._loaded_model
        return head_ops.compute(
            hidden_MH,
            batch,
            outputs,
            self.logits(),
            place_N,
            tempered=model.kind == "lm",
            chunk=max(1, most_logits(self._config, hidden_MH.device.type) // model.head.out_features),
            head_fp32=bool(self._config.head_fp32),
            part=model.part,
        )


class EngineModule(nn.Module):
    """Body and outputs. Autocast is inside the module, because DeepSpeed's engine changes it outside."""

    def __init__(self, model: LoadedModel, config: TrainingConfig) -> None:
        super().__init__()
        self.model = model.module
        self.outputs = Outputs(model, config)
        self._loaded_model, self._config = (model,), config

    @property
    def shares_prefixes(self) -> bool:
        """See :class:`rlhf_modeling.packed_model.PackedModel`. In stage 3 it is known after the model was probed."""
        return shares_prefixes(self._config, self._loaded_model[0])

    def forward(self, batch: Batch, outputs: Sequence[Head], bf16: bool) -> dict[str, Tensor]:
        """{output: [A, ...]}, fp32."""
        (model,) = self._loaded_model
        with torch.autocast(batch.ids_N.device.type, torch.bfloat16, enabled=bf16):
            hidden_MH, place_N = hidden_states(model, batch, self.shares_prefixes)
            return self.outputs(hidden_MH, place_N, batch, outputs)

    def gather_outside(self) -> None:
        """Gather parameters that are read outside of the calls of their own module. Stage 3 gathers them only around
        these calls. Outside, :class:`Outputs` reads the head's parameters, a recurrent layer reads those of its
        convolution, and DoRA reads those of a layer with an adapter, to compute the length of its rows."""
        from deepspeed.runtime.zero import register_external_parameter

        (model,) = self._loaded_model
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
