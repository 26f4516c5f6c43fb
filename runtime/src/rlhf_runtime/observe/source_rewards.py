"""Metrics of each reward source by itself, and of what environments and rollouts say about samples. The total reward of
several sources does not show what each one gave."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from rlhf.types import Group

ENV = "env"


def info_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """``env/KEY`` and ``rollout/KEY``: means of the numbers in ``Trajectory.info``, over the samples that have them."""
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in (t for group in groups for t in group.trajectories):
        for name, value in trajectory.info.items():
            numbers[name].append(value)
    return {name: math.fsum(column) / len(column) for name, column in sorted(numbers.items())}


def failure_metrics(groups: Iterable[Group], failed: float) -> dict[str, float]:
    """``reward/mean_with_failed``: the mean reward where failed samples count with the lowest reward, which is at most
    0. The mean of the other samples rises if a policy makes its reward fail where it would be low."""
    rewards = [t.reward for group in groups for t in group.trajectories if t.reward is not None]
    if not failed or not rewards:
        return {}
    lowest = min(0.0, *rewards)
    return {"reward/mean_with_failed": (math.fsum(rewards) + failed * lowest) / (len(rewards) + failed)}


def source_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """``reward/SOURCE/mean`` and ``/std`` (population) of the unweighted values, over the samples to which the source
    applied; ``reward/SOURCE/info/KEY``, the mean of each finite number in ``RewardResult.info`` (a bool is 1 or 0).
    The source ``env`` stands for the environment; its value is the sum of the rewards of a sample's turns."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    infos: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in (t for group in groups for t in group.trajectories):
        turns = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        if turns:
            values[ENV].append(math.fsum(turns))
        for source, result in trajectory.rewards.items():
            if result.value is not None:
                values[source].append(result.value)
            for key, value in result.info.items():
                if isinstance(value, bool | int | float) and math.isfinite(value):
                    infos[f"{source}/info/{key}"].append(float(value))
    metrics = {}
    for source, column in values.items():
        mean = math.fsum(column) / len(column)
        metrics[f"reward/{source}/mean"] = mean
        metrics[f"reward/{source}/std"] = math.sqrt(math.fsum((v - mean) ** 2 for v in column) / len(column))
    return metrics | {f"reward/{name}": math.fsum(column) / len(column) for name, column in infos.items()}
