"""The auxiliary loss of a mixture of experts, which keeps the router from sending all tokens to a few experts.

The loss is over all layers and all tokens that a micro-batch computes. With E experts it is E times the sum over
experts of (how often it was chosen per token) x (its mean probability), as in Switch Transformers (Fedus et al. 2022,
arXiv:2101.03961, equations 4 to 6) and in transformers. With evenly spread tokens it equals the number of experts per
token.

Deviations: 1. a prefix that sequences share counts once; 2. over several micro-batches the losses are averaged by their
tokens, so the result depends on how a batch is split, unlike all other losses here; 3. if a row has fewer tokens than
the ranks that divide it, the fill tokens count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rlhf.errors import CapabilityError, TrainingError
from rlhf.ops.batch import Batch
from torch import Tensor, nn

from rlhf_modeling.token_parts import RowPart

TOKEN_SHARE = "weight/tokens"
"""Unit column: the unit's share of the optimizer batch's tokens."""
RECORDED = "router_logits"
"""The attribute in which transformers' models list their routers."""


class ExpertBalance:
    """Watches the routers of a model. ``loss(batch)`` is of the last forward pass inside :meth:`watched`."""

    def __init__(self, module: nn.Module, coef: float) -> None:
        self.coef = coef
        self._router_outputs: list[tuple[Tensor, Tensor]] | None = None
        self._last: list[tuple[Tensor, Tensor]] = []
        for router in balanced_routers(module, coef):
            router.register_forward_hook(self._record)

    def _record(self, router: nn.Module, inputs: Any, output: Any) -> None:
        if self._router_outputs is not None:  # None while gradient checkpointing recomputes a layer
            logits, _, chosen = output
            self._router_outputs.append((logits, chosen))

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._router_outputs = []
        try:
            yield
        finally:
            self._last, self._router_outputs = self._router_outputs, None

    def loss(self, batch: Batch, part: RowPart | None = None) -> Tensor:
        """fp32 []: the micro-batch's part of the optimizer batch's loss, without the coefficient.

        Args:
            part: the tokens that this rank computed, if a row is divided over ranks. Every rank returns the same value.
        """
        layers, self._last = self._last, []
        if TOKEN_SHARE not in batch.unit:
            raise TrainingError(
                f"a trainer with aux_loss_coef needs the unit column {TOKEN_SHARE!r} in its micro-batches"
            )
        return load_balance(layers, part) * batch.unit[TOKEN_SHARE].sum()


def load_balance(layers: list[tuple[Tensor, Tensor]], part: RowPart | None = None) -> Tensor:
    """fp32 []: the auxiliary loss of (logits [N, E], chosen experts [N, k]) of each layer."""
    experts = layers[0][0].shape[-1]
    chosen_E = torch.stack([torch.bincount(chosen.reshape(-1), minlength=experts) for _, chosen in layers]).sum(0)
    probability_E = torch.stack([logits.float().softmax(-1).sum(0) for logits, _ in layers]).sum(0)
    rows = sum(logits.shape[0] for logits, _ in layers)
    if part is not None:
        chosen_E, probability_E, rows = part.total(chosen_E), part.total(probability_E), part.tokens * len(layers)
    return experts * (chosen_E / rows * (probability_E / rows)).sum()


def balanced_routers(model: nn.Module, coef: float) -> list[nn.Module]:
    """The routers of a model that is trained with ``aux_loss_coef``. Raises CapabilityError if it has none."""
    if routers := named_routers(model):
        return [router for _, router in routers]
    raise CapabilityError(
        f"trainer.aux_loss_coef = {coef:g}: {type(model).__name__} has no experts to balance (transformers declares no "
        "routers for it). Remove the option."
    )


def named_routers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, router) of each router that transformers declares for a model and its parts, in the order of its
    layers."""
    declared = [getattr(type(part), "_can_record_outputs", None) or {} for part in model.modules()]
    records: list[Any] = [recorded.get(RECORDED) for recorded in declared]
    classes = tuple(record.target_class for record in records if hasattr(record, "target_class"))
    return [(name, part) for name, part in model.named_modules() if isinstance(part, classes)]
