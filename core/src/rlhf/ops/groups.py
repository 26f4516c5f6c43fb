"""Statistics of groups, which are the samples of one prompt. An index tensor in any order assigns samples to groups.

All arithmetic is float64 and on differences from the group's smallest value. So a group of equal rewards is centred to
exactly 0. A rounding error there would become large when it is divided by a tiny standard deviation.

Shape suffix: N trajectories.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_center(r_N: Tensor, group_N: Tensor) -> Tensor:
    """r_i - mean of its group: float64 [N]. Exactly 0 for equal rewards and for groups of one."""
    index_N, size_G = _index(group_N)
    above_N = r_N.double() - _minimum(r_N.double(), index_N, size_G)[index_N]
    return above_N - (_sum(above_N, index_N, size_G) / size_G)[index_N]


def group_mean(r_N: Tensor, group_N: Tensor) -> Tensor:
    """Mean of each trajectory's group: float64 [N]."""
    index_N, size_G = _index(group_N)
    low_G = _minimum(r_N.double(), index_N, size_G)
    return (low_G + _sum(r_N.double() - low_G[index_N], index_N, size_G) / size_G)[index_N]


def leave_one_out(r_N: Tensor, group_N: Tensor) -> Tensor:
    """r_i - mean of the *others* of its group: float64 [N].

    Computed as n/(n - 1) (r_i - mean), which equals r_i - (S - r_i)/(n - 1). The result is 0 for a group of one, which
    has no others (a configured group size of 1 is refused before the run starts).
    """
    index_N, size_G = _index(group_N)
    return group_center(r_N, group_N) * (size_G / (size_G - 1).clamp(min=1))[index_N]


def group_std(r_N: Tensor, group_N: Tensor) -> Tensor:
    """Unbiased standard deviation (n - 1) of each trajectory's group: float64 [N]; 0 for groups of one."""
    index_N, size_G = _index(group_N)
    squares_G = _sum(group_center(r_N, group_N).square(), index_N, size_G)
    return (squares_G / (size_G - 1).clamp(min=1)).sqrt()[index_N]


def one_per_group(values_N: Tensor, group_N: Tensor) -> Tensor:
    """Reduce a per-group statistic with one value per trajectory to one per group: [G], groups in ascending order."""
    index_N, size_G = _index(group_N)
    return values_N.new_zeros(size_G.numel()).index_put((index_N,), values_N)


def _index(group_N: Tensor) -> tuple[Tensor, Tensor]:
    _, index_N, size_G = torch.unique(group_N, return_inverse=True, return_counts=True)
    return index_N, size_G.double()


def _sum(values_N: Tensor, index_N: Tensor, size_G: Tensor) -> Tensor:
    return torch.zeros_like(size_G).index_add_(0, index_N, values_N)


def _minimum(r_N: Tensor, index_N: Tensor, size_G: Tensor) -> Tensor:
    return torch.full_like(size_G, float("inf")).scatter_reduce_(0, index_N, r_N, "amin")
