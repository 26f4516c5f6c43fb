"""The loss of all members: each member's own loss on its own units, times its weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from rlhf.errors import ConfigError
from rlhf.interfaces import Loss
from rlhf.ops.heads import resolve_head
from rlhf.ops.loss_value import masks
from rlhf.ops.reduce import LEVEL
from rlhf.types import Head, LossOutput, Reduce

from rlhf_plugin_per_source.batch_parts import PART, join, part

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.losses import LossInput
    from torch import Tensor

FACTOR = "factor"
"""Coefficient of an update: factor of a member's weight in this step; 0 if the member trains nothing."""


class LossOfMembers(Loss):
    """Sum over members of ``weight`` times the member's loss. Each term is normalised over the member's units of the
    optimizer batch (``Reduce.unit_mask``). Terms and metrics are called ``MEMBER/<name>``.

    Raises ConfigError for a loss that cannot be computed on a part of a micro-batch.
    """

    name = "per_source"

    def __init__(self, losses: Mapping[str, Loss], weights: Mapping[str, float]) -> None:
        super().__init__()
        self.losses, self.weights = dict(losses), dict(weights)
        heads: dict[str, str | Head] = {}
        for name, loss in self.losses.items():
            mask, *other_masks = masks(loss)
            if mask != "loss_mask":
                raise _unfit(name, loss, f"reads tokens under the mask {mask}")
            if loss.prepass():
                raise _unfit(name, loss, "asks for columns before each optimizer step (prepass)")
            for output in loss.outputs():
                head = output.name if isinstance(output, Head) else output
                if isinstance(output, Head) and output.over in other_masks and not output.columns:
                    output = replace(output, name=f"{name}/{head}", over=_over(name, output.over))
                    heads[output.name] = output
                    continue
                if head == "scores" or (isinstance(output, Head) and (output.columns or output.over != "loss_mask")):
                    raise _unfit(
                        name,
                        loss,
                        f"reads the output {head!r}, which is not computed from the tokens under loss_mask alone",
                    )
                # Members share the forward pass, so one output serves all that read it.
                if heads.setdefault(head, output) != output:
                    raise _unfit(name, loss, f"uses {head!r} for a different output than another member")
        self._outputs = tuple(heads.values())

    @property
    def generator_logprobs(self) -> bool:
        return any(loss.generator_logprobs for loss in self.losses.values())

    def outputs(self) -> tuple[str | Head, ...]:
        return self._outputs

    def columns(self) -> tuple[str, ...]:
        return tuple(f"{name}/{column}" for name, loss in self.losses.items() for column in (PART, *loss.columns()))

    def signal(self) -> tuple[str, ...]:
        """The columns of all members. For a member whose loss needs all its units: the column that marks them."""
        return tuple(f"{name}/{column}" for name, loss in self.losses.items() for column in loss.signal() or (PART,))

    def reduce(self) -> dict[str, Reduce]:
        return {
            f"{name}/{term}": replace(
                reduce, coef=reduce.coef * self.weights[name], over=_over(name, reduce.over), unit_mask=f"{name}/{PART}"
            )
            for name, loss in self.losses.items()
            for term, reduce in loss.reduce().items()
        }

    def prepare(self, batch: Batch) -> Batch:
        parts = {name: part(batch, name) for name in self.losses}
        joined = join({name: self.losses[name].prepare(p) for name, p in parts.items() if p is not None}, self.losses)
        for mask in (_over(name, mask) for name, loss in self.losses.items() for mask in masks(loss)):
            if mask not in joined.tok:  # of a member without units
                joined = joined.with_column("tok", mask, torch.zeros(joined.tokens, dtype=torch.bool), over=None)
        return joined

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        summary: dict[str, float] = {}
        for name, loss in self.losses.items():
            start = f"{name}/"
            part_means = {key.removeprefix(start): mean for key, mean in means.items() if key.startswith(start)}
            summary |= {f"{start}{key}": value for key, value in loss.summary(part_means).items()}
        return summary

    def __call__(self, x: LossInput) -> LossOutput:
        terms: dict[str, Tensor] = {}
        metrics: dict[str, tuple[Any, ...]] = {}
        for name, loss in self.losses.items():
            keep_U = x[f"{name}/{PART}"]
            keep = {"token": keep_U[x.unit_A], "sequence": keep_U[x.unit_S], "unit": keep_U}
            if bool(keep_U.any()):
                output = loss(x.of_units(keep_U, f"{name}/", loss.columns(), loss.name))
            else:
                output = LossOutput(dict.fromkeys(loss.reduce(), _no_values(x, name, loss)))
            factor = x.coef.get(f"{name}/{FACTOR}", 1.0)
            for term, reduce in loss.reduce().items():
                level = {"tok": "token", "seq": "sequence", "unit": "unit"}[LEVEL[reduce.method]]
                values = output.terms[term] if factor == 1.0 else output.terms[term] * factor
                has_mask = reduce.over != "loss_mask"
                terms[f"{name}/{term}"] = values if has_mask else _spread(values, keep[level])
            for metric, (level, values, *selection) in output.metrics.items():
                if level not in keep:  # the mask of a term, which belongs to the member
                    metrics[f"{name}/{metric}"] = (_over(name, level), values, *selection)
                    continue
                mask = _spread(selection[0], keep[level]) if selection else keep[level]
                metrics[f"{name}/{metric}"] = (level, _spread(values, keep[level]), mask)
        return LossOutput(terms, metrics)


def _over(name: str, mask: str) -> str:
    """Name of a mask of a member's loss in the joined batch: the common mask, or the mask of its own term."""
    return mask if mask == "loss_mask" else f"{name}/{mask}"


def _no_values(x: LossInput, name: str, loss: Loss) -> Tensor:
    """[0], with a gradient of zero for each output of the loss. Every micro-batch must reach the same outputs: stage 3
    of ZeRO compares the order of backward passes between ranks."""
    heads = [resolve_head(output) for output in loss.outputs()]
    outputs = [head.name if head.over == "loss_mask" else f"{name}/{head.name}" for head in heads]
    return torch.cat([x[output][:0].reshape(-1) for output in outputs])


def _spread(values: Tensor, keep: Tensor) -> Tensor:
    """Scatter the values to the positions where ``keep`` is True; 0 elsewhere."""
    spread = values.new_zeros(keep.shape)
    spread[keep] = values
    return spread


def _unfit(name: str, loss: Loss, reason: str) -> ConfigError:
    return ConfigError(
        f"member {name!r}: the loss {loss.name!r} {reason}, which per_source cannot join. Remove the option that "
        "causes this, or use another loss"
    )
