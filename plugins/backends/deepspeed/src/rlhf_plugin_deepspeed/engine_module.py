"""The module that DeepSpeed wraps: one call is one micro-batch, and every rank makes the same calls inside.

ZeRO-3 gathers weights in hooks around modules, and hangs where the ranks call different modules. How many chunks of
logits a micro-batch has depends on its tokens, so the head is not called as a module per chunk: :class:`Outputs` is
called once, holds the head's weights for all of its chunks (and for the chunks that the backward pass computes again),
and multiplies by them itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rlhf.ops.batch import Batch
from rlhf.ops.heads import shape_logits
from rlhf.types import Head
from rlhf_modeling import heads as head_ops
from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.packed_model import hidden_states, shares_prefixes
from torch import Tensor, nn
from torch.nn import functional as F


class Outputs(nn.Module):
    """Hidden states to outputs. It owns no parameters: the head's belong to the model."""

    def __init__(self, loaded: LoadedModel, config: TrainingConfig) -> None:
        super().__init__()
        self._loaded, self._config = (loaded,), config  # a tuple: the head is not to become a submodule

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """[C, vocabulary] or [C, outputs of the head]."""
        (loaded,) = self._loaded
        logits_CV = F.linear(hidden_CH, loaded.head.weight, loaded.head.bias)
        return shape_logits(logits_CV, loaded.logit_scale, loaded.softcap)

    def forward(
        self, hidden_MH: Tensor, place_N: Tensor | None, batch: Batch, outputs: Sequence[Head]
    ) -> dict[str, Tensor]:
        """``hidden_MH``, ``place_N``: see :func:`rlhf_modeling.packed_model.hidden_states`."""
        (loaded,) = self._loaded
        return head_ops.compute(
            hidden_MH,
            batch,
            outputs,
            self.logits,
            place_N,
            tempered=loaded.kind == "lm",
            chunk=max(1, self._config.logits_chunk // loaded.head.out_features),
            head_fp32=self._config.head_fp32,
        )


class EngineModule(nn.Module):
    """Body and outputs. Autocast is inside, where DeepSpeed's engine leaves it alone."""

    def __init__(self, loaded: LoadedModel, config: TrainingConfig) -> None:
        super().__init__()
        self.model = loaded.module
        self.outputs = Outputs(loaded, config)
        self._loaded, self._config = (loaded,), config

    @property
    def shares_prefixes(self) -> bool:
        """See :class:`rlhf_modeling.packed_model.PackedModel`. Under stage 3 it is known once the model was probed."""
        return shares_prefixes(self._config, self._loaded[0])

    def forward(self, batch: Batch, outputs: Sequence[Head], bf16: bool) -> dict[str, Tensor]:
        """{output: [A, ...]}, fp32."""
        (loaded,) = self._loaded
        with torch.autocast(batch.ids_N.device.type, torch.bfloat16, enabled=bf16):
            hidden_MH, place_N = hidden_states(loaded, batch, self.shares_prefixes)
            return self.outputs(hidden_MH, place_N, batch, outputs)

    def gather_outside(self) -> None:
        """Stage 3 gathers parameters around the calls of the module that owns them. Some are read outside of these: the
        head's by :class:`Outputs`, and a convolution's by the recurrent layer that holds it."""
        from deepspeed.runtime.zero import register_external_parameter

        (loaded,) = self._loaded
        for parameter in loaded.head.parameters():
            register_external_parameter(self.outputs, parameter)
        for layer in loaded.module.modules():
            for child in layer.children():
                for parameter in child.parameters() if isinstance(child, nn.Conv1d) else ():
                    register_external_parameter(layer, parameter)


@contextmanager
def sparing_linear(enabled: bool) -> Iterator[None]:
    """Inside, linear layers remember their weight, not autocast's copy of it, which would keep the whole model gathered
    in bf16 from forward to backward. DeepSpeed's option for this replaces torch's function for the whole process."""
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
