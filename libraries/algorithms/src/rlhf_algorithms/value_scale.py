"""The scale of a critic: running mean and deviation of returns, in whose units it is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlhf.ops.batch import Batch
from torch import Tensor

VALUES, BOOTSTRAP, RETURNS = "old_values", "bootstrap", "returns"


class ValueScale:
    """mean and std over the returns of all tokens seen so far (Yu et al. 2022, MAPPO, arXiv:2103.01955, section 5.1).

    The critic says v, the value is V = mean + std v, and what it learns is (G - mean') / std' with the batch's own
    returns in the statistics. So the size of rewards does not meet its learning rate and its clip.

    Deviations: (1) all returns count alike, MAPPO's average forgets the old ones. (2) Weights of the critic's head are
    not changed along with the scale (as PopArt does), so a value moves a little where the scale does; with every batch
    it moves less. (3) std is 1 until the returns differ.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        """Tokens; the mean of their returns; the sum of squared distances to it."""

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count) if self.squares > 0 else 1.0

    def values(self, batch: Batch) -> Batch:
        """``old_values`` and ``bootstrap`` in the units of rewards."""
        for name in (VALUES, BOOTSTRAP):
            if name in batch.tok:
                batch = batch.with_column("tok", name, self.mean + self.std * batch.tok[name].float())
        return batch

    def targets(self, batch: Batch, said_N: Tensor) -> Batch:
        """Take the batch's ``returns`` in; then they are in the critic's units, and ``old_values`` as it said them."""
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
