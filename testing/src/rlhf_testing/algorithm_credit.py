"""Helpers of the algorithm suite for credit: longer prompts and observations must not change it, rewards must."""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Sequence

from rlhf.ops.batch import Batch
from rlhf.types import Group
from torch import Tensor

from rlhf_testing import fabricate
from rlhf_testing.algorithm_step import Step


def with_longer_contexts(groups: Sequence[Group]) -> list[Group]:
    """The same samples after longer prompts and observations; all samples of a group share the longer prompt."""
    copies: list[Group] = copy.deepcopy(list(groups))
    for group in copies:
        for trajectory in group.trajectories:
            rng = random.Random(group.trajectories[0].index[0])
            for turn in trajectory.turns:
                if not turn.sampled:
                    more = [rng.randrange(1, fabricate.VOCABULARY) for _ in range(rng.randint(3, 9))]
                    turn.ids = array("i", more) + turn.ids
    return copies


def with_rewards(groups: Sequence[Group], reward: float) -> list[Group]:
    """The same samples, all with this reward."""
    copies: list[Group] = copy.deepcopy(list(groups))
    for trajectory in (t for group in copies for t in group.trajectories if t.reward is not None):
        trajectory.reward = trajectory.score = reward
        trajectory.rewards = {name: type(result)(reward) for name, result in trajectory.rewards.items()}
    return copies


def credited_columns(step: Step) -> dict[str, Tensor]:
    """{column that ``credit`` made: its values in float64}. Of token columns only the values under the loss mask."""
    batch: Batch = step.batch
    columns = {}
    for name in sorted(step.credited):
        values = batch.column(name)
        columns[name] = (values[batch.tok["loss_mask"]] if name in batch.tok else values).double()
    return columns


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    """{column: largest difference, relative to max(largest value, 1)}; infinity where the shapes differ. Only columns
    with a difference above 1e-5."""
    differences = {}
    for name in sorted(a.keys() | b.keys()):
        left, right = a.get(name), b.get(name)
        if left is None or right is None or left.shape != right.shape:
            differences[name] = float("inf")
        elif left.numel():
            differences[name] = float((left - right).abs().max()) / max(1.0, float(left.abs().max()))
    return {name: size for name, size in differences.items() if not size <= 1e-5}
