"""Fabricated rewards, values and masks for the conformance suite of advantage estimators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Credit:
    """Fabricated input of one estimator: three groups of four trajectories, one of them without any token."""

    r_N: Tensor
    group_N: Tensor
    R_NA: Tensor
    mask_NA: Tensor
    values_NA: Tensor | None
    boot_N: Tensor | None

    @property
    def own_tokens_N(self) -> Tensor:
        """int64 [N]."""
        return self.mask_NA.sum(1)

    def rows(self, index: Tensor) -> Credit:
        """These trajectories, in this order."""
        values = None if self.values_NA is None else self.values_NA[index]
        boot = None if self.boot_N is None else self.boot_N[index]
        return Credit(self.r_N[index], self.group_N[index], self.R_NA[index], self.mask_NA[index], values, boot)


def fabricated(values: bool, seed: int = 0, scale: float = 1.0, samples: int = 4) -> Credit:
    """Rewards of size ``scale`` on tokens and trajectories; ``values`` adds a critic's output."""
    g = torch.Generator().manual_seed(seed)
    n, width = 3 * samples, 9
    lengths_N = torch.randint(1, width + 1, (n,), generator=g)
    lengths_N[0], lengths_N[1] = 0, width
    mask_NA = torch.arange(width) < lengths_N[:, None]
    R_NA = torch.where(mask_NA, scale * torch.randn(n, width, generator=g), torch.zeros(n, width))
    values_NA = torch.where(mask_NA, scale * torch.randn(n, width, generator=g), torch.zeros(n, width))
    boot_N = torch.where(torch.arange(n) % 2 == 0, torch.zeros(n), scale * torch.randn(n, generator=g))
    r_N = scale * torch.randn(n, generator=g, dtype=torch.float64)
    group_N = torch.arange(3).repeat_interleave(samples) * 7 + 5  # not 0, 1, 2: group numbers count over the whole run
    return Credit(r_N, group_N, R_NA, mask_NA, values_NA if values else None, boot_N if values else None)
