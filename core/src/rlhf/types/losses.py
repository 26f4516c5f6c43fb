"""The declarations of a loss: how values are reduced, which model outputs it reads, what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

How = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant", "seq_mean", "unit_mean"]


@dataclass(frozen=True, slots=True)
class Reduce:
    """How the values of one loss term become one number. The driver turns this into a weight per token, sequence or
    unit over the whole optimizer batch (all micro-batches, all ranks). Ranks only add.

    ========================  ==========  ===========================================================
    how                       values      weight
    ========================  ==========  ===========================================================
    token_mean                [A]         m / N
    seq_mean_token_mean       [A]         m / (T_seq S)
    seq_mean_token_sum        [A]         m / S
    seq_sum_constant          [A]         m / (S constant)
    seq_mean                  [S]         1 / S
    unit_mean                 [U]         1 / U
    ========================  ==========  ===========================================================

    N tokens under the mask, S sequences (tokens of one unit and one role) with at least one such token,
    U units with at least one such token.
    """

    method: How = "token_mean"
    over: str = "loss_mask"
    """The mask of the term's tokens. The mask of the first term is that of the loss: its :class:`LossInput` has these
    tokens. A term over another mask is reduced per token, and its values come from a :class:`Head` over that mask."""
    roles: tuple[int, ...] | None = None
    """Only sequences of these roles in their unit (0 = chosen, 1 = rejected, ...)."""
    coef: float = 1.0
    constant: float = 1.0
    unit_mask: str | None = None
    """Only units for which this unit column (bool) is True. N, S and U count only these. If there are none, all weights
    are 0."""


@dataclass(frozen=True, slots=True)
class Head:
    """A function of the model's outputs at the tokens of a mask, computed chunk by chunk, so that no [T, V] tensor
    exists.

    ``fn(logits_CV, ids_C, columns, constants) -> [C, ...]`` gets fp32 logits divided by the temperature (for scalar and
    classes heads: the head's fp32 outputs, without temperature), the chunk's token ids, and the chunk's slice of each
    column in ``columns``. It is recomputed in the backward pass. For each role in ``lenders``, ``constants[role]`` is
    the :class:`rlhf.ops.heads.OutputHead` of that role.
    """

    name: str
    fn: Callable[..., Any]
    over: str = "loss_mask"
    position: Literal["before", "at"] = "before"
    """``before``: the outputs that predict token t (log-probs, entropy, values), at the temperature at which token t
    was drawn. ``at``: the outputs after token t, without temperature."""
    columns: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    reads: Literal["logits", "hidden"] = "logits"
    """``hidden``: ``fn`` gets the fp32 hidden states [C, H], the input of the output head, instead of the logits."""
    lenders: tuple[str, ...] = ()
    """Roles whose output heads ``fn`` computes with (:class:`Lent`)."""


Level = Literal["token", "sequence", "unit"]


@dataclass(slots=True)
class LossOutput:
    """Values per token [A], sequence [S] or unit [U] for each declared term, before masks, denominators and sums."""

    terms: dict[str, Any]
    metrics: Mapping[str, tuple[Level | str, Any] | tuple[Level | str, Any, Any]] = field(default_factory=dict)
    """{name: (level, values)}: reported as the mean over all tokens, sequences or units of the optimizer batch. {name:
    (level, values, where)}: the mean only where the bool ``where`` is True; not reported if it is True nowhere. The
    level may also be the mask of a term with its own mask. The values are then per token under that mask, and are not
    reported if there is none. The run itself reports ``loss``, ``loss/<term>``, ``lr``, ``grad_norm``, ``skipped`` and
    ``aux_loss``, so these names are refused."""
