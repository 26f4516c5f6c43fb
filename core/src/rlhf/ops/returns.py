"""Returns and advantages over a trajectory's action tokens, from token rewards.

Masked positions are skipped: they neither discount nor decay, and their values are not read. The recursions run in
float64 and return the dtype of the rewards. Shape suffixes: N trajectories, A tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def return_to_go(R_NA: Tensor, mask_NA: Tensor, gamma: float) -> Tensor:
    """G_t = R_t + gamma G_{t+1} over the tokens under the mask; 0 elsewhere.

    Args:
        R_NA: floating [N, A] token rewards.
        mask_NA: bool [N, A].
        gamma: discount per action token, 0 .. 1.

    Returns: [N, A], dtype of ``R_NA``.
    """
    R = torch.where(mask_NA, R_NA, 0.0).double()
    if gamma == 1.0:
        # The same sums without a loop over positions.
        G = R.flip(1).cumsum(1).flip(1)
    else:
        G, after_N = torch.zeros_like(R), R.new_zeros(R.shape[0])
        for t in reversed(range(R.shape[1])):
            after_N = torch.where(mask_NA[:, t], R[:, t] + gamma * after_N, after_N)
            G[:, t] = after_N
    return torch.where(mask_NA, G.to(R_NA.dtype), 0.0)


def gae(
    R_NA: Tensor, values_NA: Tensor, mask_NA: Tensor, boot_N: Tensor | None, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 11-16).

    delta_t = R_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; G_t = A_t + V_t, where t + 1 is the next
    *action* token (deviation 1: other implementations also step through environment tokens). V after the last token is
    ``boot_N``, or 0 for an episode that ended.

    Args:
        R_NA, values_NA: floating [N, A].
        mask_NA: bool [N, A].
        boot_N: [N] or None, the value after the last token; 0 for samples that ended.

    Returns: (advantages, returns), each [N, A] in the dtype of ``R_NA``, 0 where masked.
    """
    zero = torch.zeros_like(R_NA)
    R, V = torch.where(mask_NA, R_NA, zero).double(), torch.where(mask_NA, values_NA, zero).double()
    advantage, after_N = torch.zeros_like(R), R.new_zeros(R.shape[0])
    next_value_N = after_N if boot_N is None else boot_N.double()
    for t in reversed(range(R.shape[1])):
        mask_N = mask_NA[:, t]
        # At a masked position this difference means nothing, and where() below discards it.
        delta_N = R[:, t] + gamma * next_value_N - V[:, t]
        after_N = torch.where(mask_N, delta_N + gamma * lam * after_N, after_N)
        next_value_N = torch.where(mask_N, V[:, t], next_value_N)
        advantage[:, t] = torch.where(mask_N, after_N, torch.zeros_like(after_N))
    return advantage.to(R_NA.dtype), torch.where(mask_NA, advantage + V, torch.zeros_like(V)).to(R_NA.dtype)
