"""Partners for ``aot`` and ``aot_unpaired``: ranks over the whole optimizer batch, computed right before its step.

Melnyk et al. 2024, Distributional preference alignment via optimal transport, arXiv:2406.05882: the k-th smallest value
of one distribution is compared with the k-th smallest of the other. The ranks and the partners' values come from a
forward pass with the weights of the step. They are therefore those of the sorted batch, and every pair can be computed
by itself:

- ``aot``: f(d_i - ref_(k)), d_i = log pi(chosen) - log pi(rejected) of rank k; the reference holds still anyway.
- ``aot_unpaired``: sum_k f(c_(k) - r_(k)) has both sides moving. With sg = a partner's value, held still,
  S1 = sum_i f(c_i - sg r) and S2 = sum_i f(sg c - r_i) are both equal to the sum, and its gradient is that of S1 + S2.
  Hence each pair adds f(c_i - sg r) + f(sg c - r_i), less their average held still.

Deviations: (1) sorted over the whole optimizer batch; TRL sorts each micro-batch on each rank. (2) Pairs without a
trained token have no rank.
"""

from __future__ import annotations

import torch
from rlhf.ops.batch import Batch
from torch import Tensor

from rlhf_plugin_dpo.weighting import tail_weights

LIVE_LOGPROBS = "now_logprobs"
"""Token column: the policy's log-probs right before the step."""
REFERENCE_PARTNER = "aot_reference"
"""Unit column, ``aot``: the reference's log-ratio between chosen and rejected of equal rank."""
REJECTED_PARTNER = "aot_rejected"
"""Unit column, ``aot_unpaired``: the rejected log-ratio with the same rank as the pair's chosen one."""
CHOSEN_PARTNER = "aot_chosen"
"""Unit column, ``aot_unpaired``: the chosen log-ratio with the same rank as the pair's rejected one."""


def paired(batch: Batch, reference_free: bool, ld_alpha: float | None = None) -> Batch:
    """The batch with the column ``aot_reference``."""
    chosen_U, rejected_U = sums(batch, batch.tok[LIVE_LOGPROBS], ld_alpha)
    reference_N = torch.zeros_like(batch.tok[LIVE_LOGPROBS]) if reference_free else batch.tok["ref_logprobs"]
    ref_chosen_U, ref_rejected_U = sums(batch, reference_N, ld_alpha)
    partner_U = partners(chosen_U - rejected_U, ref_chosen_U - ref_rejected_U, live(batch))
    return batch.with_column("unit", REFERENCE_PARTNER, partner_U)


def unpaired(batch: Batch, reference_free: bool, ld_alpha: float | None = None) -> Batch:
    """The batch with the columns ``aot_rejected`` and ``aot_chosen``."""
    ratio_N = batch.tok[LIVE_LOGPROBS] if reference_free else batch.tok[LIVE_LOGPROBS] - batch.tok["ref_logprobs"]
    chosen_U, rejected_U = sums(batch, ratio_N, ld_alpha)
    live_U = live(batch)
    batch = batch.with_column("unit", REJECTED_PARTNER, partners(chosen_U, rejected_U, live_U))
    return batch.with_column("unit", CHOSEN_PARTNER, partners(rejected_U, chosen_U, live_U))


def partners(own_U: Tensor, other_U: Tensor, live_U: Tensor) -> Tensor:
    """[U]: for each live unit the value of ``other_U`` that has the rank, among live units, of its ``own_U``; else 0.
    Equal values are ranked in the order of the batch."""
    index_L = live_U.nonzero()[:, 0]
    place_L = torch.sort(own_U[index_L], stable=True).indices
    found_U = torch.zeros_like(own_U)
    found_U[index_L[place_L]] = torch.sort(other_U[index_L]).values
    return found_U


def live(batch: Batch) -> Tensor:
    """bool [U]: pairs with a trained token, which count in a mean over pairs."""
    live_U = torch.zeros(batch.units, dtype=torch.bool)
    live_U[batch.unit_N[batch.tok["loss_mask"]]] = True
    return live_U


def sums(batch: Batch, values_N: Tensor, ld_alpha: float | None = None) -> tuple[Tensor, Tensor]:
    """Sums over the trained tokens of the chosen and of the rejected answers, [U] each."""
    mask_N = batch.tok["loss_mask"]
    role_A, unit_A, values_A = batch.role_B[batch.seq_N][mask_N], batch.unit_N[mask_N], values_N[mask_N]
    if ld_alpha is not None:
        values_A = values_A * tail_weights(batch.answer_B[batch.seq_N][mask_N], batch.answers, ld_alpha)
    zero_U = values_N.new_zeros(batch.units)
    chosen_U = zero_U.index_add(0, unit_A[role_A == 0], values_A[role_A == 0])
    return chosen_U, zero_U.index_add(0, unit_A[role_A == 1], values_A[role_A == 1])
