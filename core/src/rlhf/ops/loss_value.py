"""A loss on a micro-batch: its share of the weighted sum, and its metrics as sums. Callers add both over micro-batches
and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rlhf.errors import TrainingError
from rlhf.interfaces.loss import Loss
from rlhf.ops.batch import Batch
from rlhf.ops.losses import LossInput
from rlhf.ops.reduce import LEVEL, WEIGHT
from rlhf.types import Head, LossOutput, Reduce

LEVELS = ("token", "sequence", "unit")
"""Levels of metrics; others are masks of terms."""
RUN_METRICS = ("loss", "lr", "grad_norm", "skipped", "aux_loss")
"""Metrics of an update that the run reports itself, beside ``loss/<term>``."""
FILLER = "filler"
"""Unit column of fillers, which repeat units so that every rank has the same number of micro-batches. They have no
weight and no metrics."""


def over_mask(loss: Loss) -> str:
    """The mask of the loss, which is the mask of its first term."""
    return masks(loss)[0]


def masks(loss: Loss) -> tuple[str, ...]:
    """The mask of the loss, and the masks of terms that differ from it. Raises TrainingError for a wrong
    declaration."""
    terms = loss.reduce()
    if not isinstance(terms, Mapping) or not terms or not all(isinstance(r, Reduce) for r in terms.values()):
        raise TrainingError(
            f'reduce() of loss {loss.name!r} must return, e.g., {{"policy": Reduce("token_mean")}}, got {terms}'
        )
    for reduce in terms.values():
        if reduce.method not in LEVEL:
            raise TrainingError(
                f"loss {loss.name!r}: unknown reduction Reduce({reduce.method!r}); allowed are {', '.join(LEVEL)}"
            )
    mask, *other_masks = dict.fromkeys(reduce.over for reduce in terms.values())
    if other_masks:
        heads = {output.over for output in loss.outputs() if isinstance(output, Head)}
        for term, reduce in terms.items():
            if reduce.over != mask and (reduce.over not in heads or LEVEL[reduce.method] != "tok"):
                raise TrainingError(
                    f"loss {loss.name!r}: the term {term!r} is over {reduce.over!r}, but the first term is over "
                    f"{mask!r}. It needs a Head(..., over={reduce.over!r}) in outputs(), which has "
                    f"{', '.join(sorted(heads)) or 'none of its own'}, and a reduction per token, got {reduce.method!r}"
                )
    return (mask, *other_masks)


def required_columns(loss: Loss, heads: Iterable[Head]) -> tuple[str, ...]:
    """Every batch column that a rank needs to evaluate ``loss`` (``temperature`` if the batch has it)."""
    terms = loss.reduce()
    names = {*masks(loss), "temperature", *loss.columns(), *(WEIGHT + t for t in terms)}
    for head in heads:
        names.update((head.over, *head.columns))
    return tuple(sorted(names))


def evaluate(
    loss: Loss,
    batch: Batch,
    outputs: Mapping[str, Tensor],
    coef: Mapping[str, float],
    live: Mapping[str, str],
) -> tuple[Tensor, dict[str, tuple[float, float]]]:
    """The micro-batch's share of the loss and its metric sums.

    Args:
        batch: a micro-batch with ``weight/<term>`` columns (:func:`rlhf.ops.reduce.weigh`).
        outputs: {output name: [A, ...] at the tokens under its mask, [B] for sequence outputs}, with gradient.

    Returns: (scalar to call backward on, {metric: (sum, count)}); both add over micro-batches and ranks.
    """
    terms, over = loss.reduce(), over_mask(loss)
    x = LossInput(batch, outputs, loss.columns(), over, coef, live, loss.name)
    result: LossOutput = loss(x)
    if not isinstance(result, LossOutput):
        raise TrainingError(
            f"loss {loss.name!r} returned {type(result).__name__}, not LossOutput({{term: values}}) with the terms "
            f"{sorted(terms)} of reduce()"
        )
    if set(result.terms) != set(terms):
        raise TrainingError(
            f"loss {loss.name!r} declares the terms {sorted(terms)} in reduce() but returned {sorted(result.terms)}"
        )
    total: Tensor | None = None
    sums: dict[str, tuple[Tensor, float]] = {}
    sizes = {"token": x.tokens, "sequence": x.sequences, "unit": x.units}
    for term, reduce in terms.items():
        values, w = result.terms[term], _weights(x, batch, reduce.over, term, LEVEL[reduce.method])
        if reduce.over != over:
            sizes[reduce.over] = w.numel()
        if not isinstance(values, Tensor) or values.shape != w.shape or not values.is_floating_point():
            raise TrainingError(
                f"loss {loss.name!r}, term {term!r} reduced by {reduce.method!r} needs {tuple(w.shape)} values, "
                f"got {_shape_of(values)}{_sizes(x)}"
            )
        part = (w * values.float()).sum()
        total = part if total is None else total + part
        sums[f"loss/{term}"] = part, 0.0  # count 0: already normalised, only adds
    assert total is not None
    sums["loss"] = total, 0.0
    if FILLER not in batch.unit:
        sums |= _metric_sums(loss, result, sizes)
    # one transfer to the host for all, because each transfer waits for the device
    values = torch.stack([value.detach().to(total.device) for value, _ in sums.values()]).tolist()
    return total, {name: (value, count) for value, (name, (_, count)) in zip(values, sums.items(), strict=True)}


def _metric_sums(loss: Loss, result: LossOutput, sizes: Mapping[str, int]) -> dict[str, tuple[Tensor, float]]:
    """{metric: (sum, count)} of the metrics that the loss reports. Raises TrainingError if the sizes do not fit, or
    for a name of the run's own metrics.

    Args:
        sizes: {level: number of values}.
    """
    sums = {}
    for name, metric in result.metrics.items():
        if name in RUN_METRICS or name.startswith("loss/"):
            raise TrainingError(
                f"metric {name!r} of loss {loss.name!r} has the name of a metric that the run reports itself: "
                f"{', '.join(RUN_METRICS)}, loss/<term>. Rename it."
            )
        if not isinstance(metric, tuple) or len(metric) not in (2, 3) or metric[0] not in sizes:
            raise TrainingError(
                f"metric {name!r} of loss {loss.name!r} must be (level, values) or (level, values, where) with "
                f"a level of 'token', 'sequence' or 'unit'{_masks(sizes)}, got {type(metric).__name__} {metric!r:.80}"
            )
        level, values, *selection = metric
        expected = sizes[level]
        bools = all(isinstance(w, Tensor) and w.shape == (expected,) and w.dtype == torch.bool for w in selection)
        if not isinstance(values, Tensor) or values.shape != (expected,) or not bools:
            raise TrainingError(
                f"metric {name!r} of loss {loss.name!r} per {level} needs [{expected}] values, and the same number of "
                f"bools if it has a selection; got {_shape_of(values)}"
            )
        values = values[selection[0]] if selection else values
        if values.numel() or not (selection or level not in LEVELS):
            sums[name] = values.detach().float().sum(), float(values.numel())
    return sums


def _masks(sizes: Mapping[str, int]) -> str:
    """The levels that are masks of terms, for an error message."""
    return "".join(f" or {name!r}" for name in sizes if name not in LEVELS)


def _shape_of(values: object) -> str:
    if not isinstance(values, Tensor):
        return f"{type(values).__name__} {values!r:.60}"
    return f"{tuple(values.shape)}{'' if values.is_floating_point() else f' of {values.dtype}'}"


def _sizes(x: LossInput) -> str:
    """The allowed sizes of the first dimension of values, for an error message."""
    return (
        f" (the micro-batch has {x.tokens} tokens, {x.sequences} sequences and {x.units} units). A loss returns "
        "values that are not averaged; reduce() declares how they are averaged"
    )


def _weights(x: LossInput, batch: Batch, over: str, term: str, level: str) -> Tensor:
    column = batch.column(WEIGHT + term)
    if level == "tok":
        return column[batch.index(over)]
    if level == "unit":
        return column
    # weigh() stores the weight of an answer at the first of its sequences.
    return column.new_zeros(x.sequences).index_add(0, x.answer_B, column)


def add_sums(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Add metric sums over micro-batches or ranks, in order."""
    total: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, count) in part.items():
            old = total.get(name, (0.0, 0.0))
            total[name] = (old[0] + value, old[1] + count)
    return total


def finish_sums(sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Means from sums. Entries with count 0 are already normalised."""
    return {name: value / count if count else value for name, (value, count) in sums.items()}
