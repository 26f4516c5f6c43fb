"""Computes a micro-batch: packed sequences, common prefixes once, outputs from the hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from rlhf.errors import CapabilityError
from rlhf.ops.batch import Batch
from rlhf.ops.experts import EXPERTS
from rlhf.types import Head
from torch import Tensor, nn

from rlhf_modeling import heads as head_ops
from rlhf_modeling.activations import copies
from rlhf_modeling.attention import Route, attend_with, attention_route
from rlhf_modeling.config import TrainingConfig, most_logits
from rlhf_modeling.host_inputs import HostInputs
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.noise import has_noise
from rlhf_modeling.router_replay import replayed, replayed_choices

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PackedModel(nn.Module):
    """Body, head and outputs in one ``forward``. A runtime that shards weights sees one call per micro-batch."""

    def __init__(self, model: LoadedModel, config: TrainingConfig) -> None:
        super().__init__()
        self.model = model.module
        self.loaded_model, self.config = model, config

    @cached_property  # it asks every module of the model
    def shares_prefixes(self) -> bool:
        """Whether sequences of a micro-batch compute a shared prefix once. They do not if each draws its own noise."""
        config, model = self.config, self.loaded_model
        if not config.shared_prefixes or config.neftune_alpha is not None or model.layout != "shared":
            return False
        return not model.noisy and not has_noise(model.module)

    def forward(self, batch: Batch, outputs: Sequence[Head]) -> dict[str, Tensor]:
        """{output: [A, ...]}, fp32; see :func:`rlhf_modeling.heads.compute`."""
        return self.outputs_of(*self.hidden_states(batch), batch, outputs)

    def hidden_states(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """See :meth:`rlhf_modeling.loaded.LoadedModel.compute`."""
        model, host = self.loaded_model, batch.host
        lens = host.lens_B.tolist()
        model.require_positions(lens)
        experts_NLK = host.tok.get(EXPERTS) if model.routers is not None else None
        return model.compute(host.ids_N, host.position_N, lens, self.shares_prefixes, batch.images_B, experts_NLK)

    def outputs_of(
        self,
        hidden_MH: Tensor,
        place_N: Tensor | None,
        batch: Batch,
        outputs: Sequence[Head],
        product: Callable[[Tensor], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Outputs from the results of :meth:`hidden_states`. ``product``: see :meth:`LoadedModel.logits_of`."""
        device, tempered = hidden_MH.device.type, self.loaded_model.kind == "lm" and head_ops.is_tempered(batch)
        backward, names = torch.is_grad_enabled(), [head.name for head in outputs]
        count = copies(names, backward=backward, device=device, tempered=tempered)
        limit = most_logits(self.config, device, count, backward=backward)
        return head_ops.compute(
            hidden_MH,
            batch,
            outputs,
            self.loaded_model.logits_of(self.config.head_fp32, product),
            place_N,
            tempered=tempered,
            chunk=max(1, limit // self.loaded_model.head.out_features),
            head_fp32=bool(self.config.head_fp32),
            part=self.loaded_model.part,
        )


@contextmanager
def _as_before(route: Route | None, choices_MLK: Tensor | None) -> Iterator[None]:
    with nullcontext() if route is None else attend_with(route), replayed(choices_MLK):
        yield


def checkpoint_gradients(module: PreTrainedModel, inputs: HostInputs | None) -> None:
    """Compute layers again in the backward pass, under the lengths and with the experts of the forward pass.

    Args:
        inputs: moves their inputs to the host; None: they stay on the device.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        # the second forward pass runs inside backward(), outside of the contexts of the first one
        return nullcontext(), _as_before(attention_route(), replayed_choices())

    enable = getattr(module, "activation_checkpointing_enable", None)  # the name since transformers 5.23
    try:
        (enable or module.gradient_checkpointing_enable)({"use_reentrant": False, "context_fn": contexts})
    except ValueError as cause:
        raise CapabilityError(
            f"{type(module).__name__} cannot recompute its layers in the backward pass: transformers has no gradient "
            "checkpointing for it. Set gradient_checkpointing = false."
        ) from cause
    if inputs is None:
        return
    for attributes in map(vars, module.modules()):
        if (checkpointed := attributes.get("_gradient_checkpointing_func")) is not None:
            attributes["_gradient_checkpointing_func"] = inputs.around(checkpointed)
