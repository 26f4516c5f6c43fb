"""The critic: its loss, and the scale of its targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from rlhf.interfaces import ComponentConfig, Loss
from rlhf.ops.batch import Batch
from rlhf.ops.losses import LossInput
from rlhf.types import LossOutput, Reduce
from torch import Tensor

from rlhf_algorithms.ratios import clip

VALUES, BOOTSTRAP, RETURNS = "old_values", "bootstrap", "returns"


class ValueConfig(ComponentConfig):
    clip: float = Field(default=0.5, ge=0)
    """Range around the value at the start of the update, beyond which V_clip no longer follows V; 0 = off."""


class Value(Loss):
    """L = 1/2 max((V_clip - G)^2, (V - G)^2), V_clip = V_old + clip(V - V_old, +-clip); mean over tokens."""

    name = "value"
    source = "Schulman et al. 2017, arXiv:1707.06347; value clipping as in OpenAI baselines"
    Config = ValueConfig
    data = "prompts"

    def outputs(self) -> tuple[str, ...]:
        return ("values",)

    def columns(self) -> tuple[str, ...]:
        return ("returns",) if self.config.clip == 0 else ("returns", "old_values")

    def reduce(self) -> dict[str, Reduce]:
        return {"value": Reduce("token_mean")}

    def __call__(self, x: LossInput) -> LossOutput:
        values_A, returns_A = x["values"], x["returns"]
        error_A = (values_A - returns_A).square()
        metrics: dict[str, tuple[Any, Tensor]] = {"value": ("token", values_A), "return": ("token", returns_A)}
        if self.config.clip > 0:
            old_A = x["old_values"]
            moved_A = values_A - old_A
            clipped_A = (old_A + clip(moved_A, -self.config.clip, self.config.clip) - returns_A).square()
            # old + (v - old) may differ from v in its last bit, so count only values that moved out of the range
            outside_A = moved_A.abs() > self.config.clip
            metrics["value_clip_fraction"] = ("token", (outside_A & (clipped_A > error_A)).float())
            error_A = torch.maximum(clipped_A, error_A)
        return LossOutput({"value": error_A / 2}, metrics)


class ValueScale:
    """Mean and std of the returns of all tokens seen so far (Yu et al. 2022, MAPPO, arXiv:2103.01955, section 5.1).

    The critic outputs v, the value is V = mean + std v, and the target is (G - mean') / std', where the statistics
    include the batch's own returns. So the critic's learning rate and clip do not depend on the scale of rewards.

    Deviations: (1) all returns have equal weight; MAPPO's average forgets old ones. (2) The weights of the critic's
    head are not adjusted when the scale changes (as PopArt does), so values change a little with the scale, and less
    with every batch. (3) std is 1 until the returns differ.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        """Number of tokens; mean of their returns; sum of squared differences from the mean."""

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count) if self.squares > 0 else 1.0

    def values(self, batch: Batch) -> Batch:
        """Convert ``old_values`` and ``bootstrap`` to the scale of rewards."""
        for name in (VALUES, BOOTSTRAP):
            if name in batch.tok:
                batch = batch.with_column("tok", name, self.mean + self.std * batch.tok[name].float())
        return batch

    def targets(self, batch: Batch, said_N: Tensor) -> Batch:
        """Update the statistics with the batch's ``returns``, and convert them to the critic's scale. ``old_values``
        become the critic's own outputs."""
        self.add(batch.tok[RETURNS][batch.tok["loss_mask"]])
        batch = batch.with_column("tok", RETURNS, ((batch.tok[RETURNS].double() - self.mean) / self.std).float())
        # Not (values - mean) / std: the mean and std have changed since values() converted them.
        return batch.with_column("tok", VALUES, said_N)

    def add(self, returns_A: Tensor) -> None:
        """Merge (Chan et al. 1983): exact for any split into batches, up to rounding."""
        count = int(returns_A.numel())
        if not count:
            return
        mean = float(returns_A.double().mean())
        delta, total = mean - self.mean, self.count + count
        self.squares += float((returns_A.double() - mean).square().sum()) + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])
