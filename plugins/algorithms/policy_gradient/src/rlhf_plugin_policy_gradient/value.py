"""The critic's loss."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from rlhf.interfaces import ComponentConfig, Loss
from rlhf.types import LossOutput, Reduce


class ValueConfig(ComponentConfig):
    clip: float = Field(default=0.5, ge=0)
    """Range around the value at the start of the update, beyond which V_clip no longer follows V; 0 = off."""


class Value(Loss):
    """L = 1/2 max((V_clip - G)^2, (V - G)^2), V_clip = V_old + clip(V - V_old, +-clip); mean over tokens."""

    name = "value"
    source = "Schulman et al. 2017, arXiv:1707.06347; value clipping as in OpenAI baselines"
    Config = ValueConfig

    def outputs(self) -> tuple[str, ...]:
        return ("values",)

    def columns(self) -> tuple[str, ...]:
        return ("returns",) if self.config.clip == 0 else ("returns", "old_values")

    def reduce(self) -> dict[str, Reduce]:
        return {"value": Reduce("token_mean")}

    def __call__(self, x: Any) -> LossOutput:
        values_A, returns_A = x["values"], x["returns"]
        error_A = (values_A - returns_A).square()
        metrics: dict[str, tuple[Any, torch.Tensor]] = {"value": ("token", values_A), "return": ("token", returns_A)}
        if self.config.clip > 0:
            old_A = x["old_values"]
            moved_A = values_A - old_A
            clipped_A = (old_A + moved_A.clamp(-self.config.clip, self.config.clip) - returns_A).square()
            # old + (v - old) may differ from v in its last bit, so count only values that moved out of the range
            outside_A = moved_A.abs() > self.config.clip
            metrics["value_clip_fraction"] = ("token", (outside_A & (clipped_A > error_A)).float())
            error_A = torch.maximum(clipped_A, error_A)
        return LossOutput({"value": error_A / 2}, metrics)
