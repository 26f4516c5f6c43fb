"""The parts of a learning step: annotations of the batch, updates of roles, snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf.types.losses import Head


@dataclass(frozen=True, slots=True)
class Annotation:
    """``column := output of role on the batch``, computed without gradient before the update."""

    role: str
    output: str | Head
    column: str
    view: str = "live"
    per_row: bool = True
    """Each sequence depends on one data row only. False if the algorithm combines rows."""


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
    """{column: output}: if the column is not in the batch, the detached live output replaces it. Refused unless the
    update has exactly one optimizer step, because only then are both equal by definition."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights of ``role`` := ``share`` * weights of ``source`` + (1 - ``share``) * weights of ``role``. With ``share``
    1, ``role`` becomes a copy (reference := policy)."""

    role: str
    source: str
    share: float = 1.0
    """Above 0, at most 1. The mix is computed in fp32 and rounded to the precision of ``role``'s weights."""
