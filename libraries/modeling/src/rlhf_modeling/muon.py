"""Muon for the layers' matrices and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OrthogonalAdamW(torch.optim.AdamW):
    """Groups with ``muon = True`` take Muon's step, the others AdamW's.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces a matrix's momentum by the nearest orthogonal
    one; the step is as large as AdamW's (Liu et al. 2025, arXiv:2502.16982): 0.2 sqrt(the longer side) times the rate.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        try:
            self.param_groups = [g for g in groups if not g.get("muon")]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group.get("muon"):
                self.muon_step(group)

    def muon_step(self, group: dict[str, Any]) -> None:
        """Muon's step for whole matrices, by torch's own functions, with the state of this optimizer."""
        options = {key: group[key] for key in ("lr", "weight_decay", "momentum")}
        muon = torch.optim.Muon(group["params"], **options, adjust_lr_fn="match_rms_adamw")
        muon.state = self.state
        muon.step()
