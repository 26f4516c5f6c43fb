"""The formulas, which compute one loss value per pair from log-ratios.

c = log pi(chosen) - log ref(chosen), and r is the same for the rejected answer. Both are sums over an answer's tokens,
[U]. h = c - r is the *margin*. Every function takes and returns [U], in the dtype of its input. Value and gradient are
finite for |c|, |r| up to 1e4. beta > 0.

Deviations from the papers and from TRL: (1) :func:`discopop` computes its product of exp and sigmoid as one exp of a
sum, as exp alone overflows. (2) :func:`divergence_score` bounds exponents to 40.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from rlhf_algorithms.pairs import hinge_loss, logistic_loss
from torch import Tensor
from torch.nn.functional import logsigmoid

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
EXPONENT_BOUND = 40.0


def sigmoid(h_U: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h).

    eps = 0: Rafailov et al. 2023, DPO, arXiv:2305.18290, eq. 7. eps > 0: conservative DPO (Mitchell 2023, "A note on
    DPO with noisy preferences and relationship to IPO"), which believes that a label is wrong with probability eps.
    """
    return logistic_loss(beta * h_U, label_smoothing)


def robust(h_U: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """(-(1 - eps) log sigmoid(beta h) + eps log sigmoid(-beta h)) / (1 - 2 eps), eps < 1/2.

    Unbiased if labels are flipped with probability eps: Chowdhury et al. 2024, arXiv:2403.00409. It has no lower bound.
    """
    clean_U, flipped_U = -logsigmoid(beta * h_U), -logsigmoid(-beta * h_U)
    return ((1 - label_smoothing) * clean_U - label_smoothing * flipped_U) / (1 - 2 * label_smoothing)


def hinge(h_U: Tensor, beta: float) -> Tensor:
    """max(0, 1 - beta h): Zhao et al. 2023, SLiC-HF, arXiv:2305.10425, on log-ratios as Liu et al. 2023, RSO,
    arXiv:2309.06657."""
    return hinge_loss(beta * h_U)


def ipo(h_U: Tensor, beta: float) -> Tensor:
    """(h - 1 / (2 beta))^2: Azar et al. 2023, arXiv:2310.12036, eq. 17, whose tau is beta.

    ``h_U`` is the difference of the *means* over tokens in TRL, which the paper's authors confirmed, and of the sums in
    OpenRLHF.
    """
    return (h_U - 1 / (2 * beta)) ** 2


def exo_pair(h_U: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """KL of (sigmoid(beta h), sigmoid(-beta h)) to (1 - eps, eps): Ji et al. 2024, EXO, arXiv:2402.00856, eq. 16 with
    two answers. eps in (0, 1/2); the paper's is 1e-3."""
    x_U = beta * h_U
    won_U = torch.sigmoid(x_U) * (logsigmoid(x_U) - math.log1p(-label_smoothing))
    lost_U = torch.sigmoid(-x_U) * (logsigmoid(-x_U) - math.log(label_smoothing))
    return won_U + lost_U


def discopop(h_U: Tensor, beta: float, tau: float) -> Tensor:
    """(1 - m) (-log sigmoid(x)) + m exp(-x), x = beta h, m = sigmoid(x / tau): Lu et al. 2024, DiscoPOP,
    arXiv:2406.08414, eq. 5. tau in (0, 1]: above 1 it grows like exp(-x)."""
    x_U = beta * h_U
    logistic_U = -logsigmoid(x_U) * torch.sigmoid(-x_U / tau)
    return logistic_U + torch.exp(logsigmoid(x_U / tau) - x_U)


def nca_pair(c_U: Tensor, r_U: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta c) - (log sigmoid(-beta c) + log sigmoid(-beta r)) / 2: Chen et al. 2024, noise contrastive
    alignment, arXiv:2402.05369."""
    return -logsigmoid(beta * c_U) - 0.5 * (logsigmoid(-beta * c_U) + logsigmoid(-beta * r_U))


def bco_pair(c_U: Tensor, r_U: Tensor, beta: float, shift: float = 0.0) -> Tensor:
    """-log sigmoid(beta c - shift) - log sigmoid(shift - beta r): Jung et al. 2024, BCO, arXiv:2404.04656, where
    ``shift`` is the running mean of the rewards beta c and beta r. TRL 1.16 has no shift (0)."""
    return -logsigmoid(beta * c_U - shift) - logsigmoid(shift - beta * r_U)


def sppo_hard(c_U: Tensor, r_U: Tensor, beta: float) -> Tensor:
    """(c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2: Wu et al. 2024, SPPO, arXiv:2405.00675, eq. 4.7 with a preference
    probability of 1 and 0; the paper's eta is 1 / beta."""
    return (c_U - 0.5 / beta) ** 2 + (r_U + 0.5 / beta) ** 2


def apo_zero(c_U: Tensor, r_U: Tensor, beta: float) -> Tensor:
    """1 - sigmoid(beta c) + sigmoid(beta r): D'Oosterlinck et al. 2024, APO, arXiv:2408.06266, eq. 7. For chosen
    answers better than the model's own."""
    return torch.sigmoid(-beta * c_U) + torch.sigmoid(beta * r_U)


def apo_down(c_U: Tensor, r_U: Tensor, beta: float) -> Tensor:
    """sigmoid(beta c) + 1 - sigmoid(beta (c - r)): arXiv:2408.06266, eq. 8. For chosen answers worse than the model's
    own."""
    return torch.sigmoid(beta * c_U) + torch.sigmoid(-beta * (c_U - r_U))


def divergence_score(logratio: Tensor, divergence: Divergence, alpha: float = 0.5) -> Tensor:
    """f'(u) at u = exp(logratio), without terms that cancel in the margin: Wang et al. 2023, f-DPO, arXiv:2309.16240.

    ============================  =============================================
    ``reverse_kl``                log u (DPO)
    ``forward_kl``                1 - 1 / u
    ``js_divergence``             log 2 + log(u / (1 + u))
    ``alpha_divergence``          (u^(alpha - 1) - 1) / (alpha - 1); log u at alpha = 1
    ============================  =============================================

    Defined for margins only, because a constant of the prompt cancels only in a margin.
    """
    if divergence == "forward_kl":
        return -torch.expm1(_bounded(-logratio))
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(logratio)
    if divergence == "alpha_divergence" and alpha != 1:
        return torch.expm1(_bounded((alpha - 1) * logratio)) / (alpha - 1)
    return logratio


def _bounded(exponent: Tensor) -> Tensor:
    """The exponent, at most 40, so that even its square is finite in fp32; the gradient passes through the bound."""
    return exponent.clamp(max=EXPONENT_BOUND).detach() + (exponent - exponent.detach())
