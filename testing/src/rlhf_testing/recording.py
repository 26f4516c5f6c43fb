"""A wrapper of a loss that records the sum of the absolute terms. Loss differences are measured relative to that
sum."""

from __future__ import annotations

from typing import Any

import torch
from rlhf.interfaces.loss import Loss
from rlhf.ops.losses import LossInput
from rlhf.ops.reduce import WEIGHT
from rlhf.types import LossOutput

from rlhf_testing.contract import Nonconformance


class Passed(dict[str, float]):
    """Coefficients of an update. Reading a missing one raises an error with its name."""

    def __missing__(self, name: str) -> float:
        raise Nonconformance(
            f"the loss reads the coefficient {name!r}, but the update passes {sorted(self)}: add it to Update.coef "
            "(in the suite of a loss: coef = {...})"
        )


class Recording:
    """Replaces ``loss`` in :func:`rlhf.ops.loss_value.evaluate` and in trainers of this process.

    ``size`` is ``sum |weight * value|`` over all terms and micro-batches so far.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.size = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, x: LossInput) -> LossOutput:
        x.coef = Passed(x.coef)
        result = self._loss(x)
        reduces, batch = self._loss.reduce(), x._batch
        if not isinstance(result, LossOutput) or set(result.terms) != set(reduces):
            return result  # evaluate() refuses it with the reason
        for term, values in result.terms.items():
            if not isinstance(values, torch.Tensor):
                return result  # evaluate() refuses it
            if values.dtype in (torch.float16, torch.bfloat16):
                raise Nonconformance(
                    f"the term {term!r} is {values.dtype}: the input of a loss is float32, so its terms must be float32"
                )
            weight = batch.column(WEIGHT + term)
            reduction = reduces[term].method
            if reduction == "seq_mean":
                weight = weight.new_zeros(x.sequences).index_add(0, x.answer_B, weight)
            elif reduction != "unit_mean":
                weight = weight[batch.tok[reduces[term].over]]
            if weight.shape == values.shape:  # otherwise evaluate() refuses it with the reason
                self.size += float((weight * values.detach()).abs().sum())
        return result
