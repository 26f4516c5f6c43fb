"""What a step computed of each sampled token before its update: log-probs, values, advantages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rlhf.ops.batch import Batch
from rlhf.types import Annotation
from rlhf.types.arrays import FloatArray, float_array

OUTPUTS = ("logprobs", "values")
"""Outputs of roles that are one number a token."""
ADVANTAGES = "advantages"


def token_values(batch: Batch, annotations: Sequence[Annotation]) -> dict[tuple[int, int], dict[str, FloatArray]]:
    """{index of a sample: {``ROLE/OUTPUT`` or ``advantages``: a value for each sampled token, in order}}. One value
    stands for all where they are equal.

    Args:
        batch: after credit.
        annotations: those of the batch.

    Samples that are not in the batch as they were sampled are left out, and all samples where the units of the batch
    are no samples.
    """
    columns = {f"{a.role}/{a.output}": a.column for a in annotations if a.output in OUTPUTS and a.view == "live"}
    columns = {name: column for name, column in {**columns, ADVANTAGES: ADVANTAGES}.items() if column in batch.tok}
    if not columns or not {"group", "sample", "own_tokens"} <= {*batch.unit}:
        return {}
    mask_N = batch.tok["loss_mask"]
    count_U = torch.zeros(batch.units, dtype=torch.int64).index_add_(0, batch.unit_N, mask_N.long())
    ends, own = count_U.cumsum(0).tolist(), batch.unit["own_tokens"].tolist()
    values = {name: batch.tok[column][mask_N].float().numpy() for name, column in columns.items()}
    result = {}
    for unit, index in enumerate(zip(batch.unit["group"].tolist(), batch.unit["sample"].tolist(), strict=True)):
        first, last = ends[unit] - own[unit], ends[unit]
        if own[unit] and own[unit] == int(count_U[unit]):
            parts: dict[str, Any] = {name: values_A[first:last] for name, values_A in values.items()}
            result[index] = {n: float_array(v[:1] if (v == v[0]).all() else v, n) for n, v in parts.items()}
    return result
