"""What a step of learning consists of: annotations of the batch, updates of roles, snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf.types.losses import Head


@dataclass(frozen=True, slots=True)
class Annotation:
    """``column := role's output on the batch``, computed without gradient before the update."""

    role: str
    output: str | Head
    column: str
    view: str = "live"
    per_row: bool = True
    """Each sequence is a function of one data row; False where the algorithm puts rows together."""


@dataclass(frozen=True, slots=True)
class Update:
    """Train ``role`` with the loss in slot ``loss``: epochs x minibatches optimizer steps."""

    role: str
    loss: str
    epochs: int = 1
    minibatches: int = 1
    coef: Mapping[str, float] = field(default_factory=dict)
    """Coefficients that change over the run (adaptive KL); a loss reads them as ``x.coef[name]``."""
    live: Mapping[str, str] = field(default_factory=dict)
    """{column: output}: where the column is not in the batch, it is the detached live output. Refused unless
    the update has exactly one optimizer step, where both are equal by definition."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``role := share source + (1 - share) role``, of the weights (reference := policy, where ``share`` is 1)."""

    role: str
    source: str
    share: float = 1.0
    """Above 0, at most 1. Mixed in fp32 and rounded to the precision in which ``role`` holds its weights."""
