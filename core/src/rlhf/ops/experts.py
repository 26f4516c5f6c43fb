"""Records of the experts that a model chose: checks, removal of repeated tokens, and the batch column.

Shape suffixes: T tokens of a record, N tokens of a batch, L layers with experts, K experts that a token uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.types import ExpertLayers, ExpertRecord, Turn

EXPERTS = "experts"
"""Token column, int16 [N, L, K]: the experts of each token, :data:`UNKNOWN` for tokens without a record."""
UNKNOWN = -1


def record_of(choices_TLK: Any, layers: ExpertLayers) -> ExpertRecord:
    """The record of choices, a numpy array of integers."""
    record = ExpertRecord(b"", len(layers.layers), layers.experts, layers.chosen)
    return replace(record, choices=choices_TLK.astype(record.dtype).tobytes())


def choices_of(record: ExpertRecord) -> np.ndarray:
    """[T, L, K]."""
    flat: np.ndarray = np.frombuffer(record.choices, record.dtype)
    return flat.reshape(-1, record.layers, record.chosen)


def check_records(turns: Sequence[Turn], model: ExpertLayers | None) -> None:
    """Raises ValueError if a record is damaged, longer than its turn's context, or of another model.

    Args:
        model: expert layers of the model that replays the records; None: no model replays them.
    """
    tokens = 0
    for number, turn in enumerate(turns):
        tokens = len(turn.ids) + (0 if turn.fresh else tokens)
        record = turn.experts
        if record is None:
            continue
        if not turn.sampled:
            raise ValueError(f"turn {number} has a record of experts, but it was not sampled")
        if not record.token_bytes or len(record.choices) % record.token_bytes or record.tokens >= max(tokens, 1):
            raise ValueError(
                f"turn {number}: its record of experts has {len(record.choices)} bytes, {record.token_bytes} for each "
                f"token; allowed: at most {max(tokens, 1) - 1} whole tokens, those before the turn's last token"
            )
        if model is None:
            continue
        sizes, allowed = (
            (record.layers, record.experts, record.chosen),
            (len(model.layers), model.experts, model.chosen),
        )
        if sizes != allowed:
            raise ValueError(
                f"turn {number}: its record of experts comes from a model with {_layout(sizes)}; the policy has "
                f"{_layout(allowed)}. Records of another model cannot be replayed: set trainer.router_replay = false, "
                "or sample again."
            )
        if record.tokens and not 0 <= choices_of(record).min() <= choices_of(record).max() < model.experts:
            raise ValueError(
                f"turn {number}: its record names an expert that does not exist; the model has {model.experts} per "
                "layer"
            )


def _layout(sizes: tuple[int, int, int]) -> str:
    return f"{sizes[0]} layers of {sizes[1]} experts, {sizes[2]} for each token"


def drop_repeated(turns: Sequence[Turn]) -> None:
    """Cut from each record the tokens that the record of an earlier turn of its sequence has."""
    tokens = end = 0  # number of tokens of the sequence so far, and the end of the part that records cover
    for turn in turns:
        if turn.fresh:
            tokens = end = 0
        tokens += len(turn.ids)
        if turn.experts is None:
            continue
        repeated = end - (tokens - 1 - turn.experts.tokens)
        if repeated > 0:
            turn.experts = replace(turn.experts, choices=turn.experts.choices[repeated * turn.experts.token_bytes :])
        end = max(end, tokens - 1)


def expert_column(turns: Sequence[Turn]) -> Tensor | None:
    """int16 [N, L, K] for consecutive turns; None if no turn has a record. If two records cover a token, the earlier
    one counts, because it comes from the pass that sampled the token.

    Raises ValueError if the records are of different models.
    """
    ends = list(accumulate(len(turn.ids) for turn in turns))
    records = [(end, turn.experts) for end, turn in zip(ends, turns, strict=True) if turn.experts is not None]
    if not records:
        return None
    shapes = {(record.layers, record.chosen) for _, record in records}
    if len(shapes) > 1:
        raise ValueError(
            f"the records of experts come from different models: their (layers, experts per token) are {sorted(shapes)}"
        )
    column_NLK = np.full((ends[-1], *shapes.pop()), UNKNOWN, np.int16)
    # From the last record to the first, so that earlier ones overwrite later ones. A record ends before the last token
    # of its turn, which is never an input.
    for end, record in reversed(records):
        column_NLK[end - 1 - record.tokens : end - 1] = choices_of(record)
    return torch.from_numpy(column_NLK)


def distinct_ids(ids_N: Tensor, experts_NLK: Tensor) -> Tensor:
    """int64 [N] on the CPU: equal numbers for tokens with equal ids and equal records, for
    :func:`rlhf.ops.prefixes.sorted_by_prefix`. Numbers of other tokens differ (up to collisions of a 64-bit hash)."""
    choices_NC = experts_NLK.flatten(1).cpu().numpy()
    # Odd factors are invertible modulo 2**64, so tokens that differ in one number only cannot collide.
    odd_C = np.random.default_rng(0).integers(-(2**62), 2**62, choices_NC.shape[1] + 1) * 2 + 1
    hash_N = choices_NC @ odd_C[1:] + ids_N.cpu().numpy() * odd_C[0]  # of int64, wraps around
    return torch.from_numpy(np.unique(hash_N, return_inverse=True)[1])
