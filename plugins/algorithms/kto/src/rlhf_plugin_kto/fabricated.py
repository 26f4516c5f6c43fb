"""Made-up mismatched answers, for the conformance suite of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_plugin_kto.twins import TWIN, TWIN_MASK

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch

RISE = 2.0
"""Nats by which the policy is above its reference at each token of a mismatched answer."""


def twin_tokens(unit: int) -> int:
    """Tokens of a unit's mismatched answer; the first unit has none."""
    return 1 + unit % 3 if unit else 0


def with_twins(suite: Any, batch: Batch, seed: int) -> Batch:
    """The suite's units, each but the first with a mismatched answer behind a prompt of one token (``assembled`` of
    :class:`rlhf_testing.loss.LossContract`)."""
    import torch
    from rlhf.ops.packing import SequenceData, UnitData, pack

    units = []
    for u in range(batch.units):
        single, n = batch.select([u]), twin_tokens(u)
        own = {name: values.tolist() for name, values in single.tok.items()}
        sequences = [SequenceData(single.ids_N.tolist(), {**own, TWIN_MASK: [False] * single.tokens})]
        if n:
            tok = {name: [values[0]] * (n + 1) for name, values in own.items()}
            masks = {"loss_mask": [False] * (n + 1), TWIN_MASK: [False] + [True] * n}
            sequences.append(SequenceData([7] * (n + 1), {**tok, **masks}, TWIN))
        units.append(UnitData(sequences, {"label": bool(single.unit["label"][0])}))
    twin_batch = pack(units)
    reference_N = -1.0 - torch.arange(twin_batch.tokens) % 4
    twin_batch = twin_batch.with_column("tok", "twin_ref_logprobs", reference_N, over=TWIN_MASK)
    return twin_batch.with_column("tok", "twin_logprobs", reference_N + RISE, over=TWIN_MASK)
