"""The scale of a critic's targets: running mean and standard deviation of returns."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhf.ops.batch import Batch
from torch import Tensor

VALUES, BOOTSTRAP, RETURNS = "old_values", "bootstrap", "returns"


class ValueScale:
    """mean and std over the returns of all tokens seen so far (Yu et al. 2022, MAPPO, arXiv:2103.01955, section 5.1).

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
        return batch.with_column("tok", VALUES, said_N)

    def add(self, returns_A: Tensor) -> None:
        """Merge (Chan et al. 1983): exact for any split into batches, up to rounding."""
        count = int(returns_A.numel())
        if not count:
            return
        mean = float(returns_A.double().mean())
        apart, total = mean - self.mean, self.count + count
        self.squares += float((returns_A.double() - mean).square().sum()) + apart**2 * self.count * count / total
        self.mean += apart * count / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])
