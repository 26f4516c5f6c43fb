"""The length reward counts the policy's own tokens."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf_plugin_length import LengthReward


def values(*lengths: int, **config) -> list[float | None]:
    row = Row({}, "unit", 0)

    def trajectory(i: int, n: int) -> Trajectory:
        turns = [
            Turn([1] * 50, False),
            Turn([2] * (n - n // 2), True),
            Turn([3] * 70, False),
            Turn([2] * (n // 2), True),
        ]
        return Trajectory(row, turns, (0, i))

    group = Group(row, 0, [trajectory(i, n) for i, n in enumerate(lengths)])
    return [r.value for r in asyncio.run(LengthReward(LengthReward.Config(**config)).score(group))]


def test_a_range_a_floor_and_a_ceiling() -> None:
    assert values(3, 5, 7, 10, 12, low=5, high=10, per_token=0.25) == [-0.5, 0.0, 0.0, 0.0, -0.5]
    assert values(0, 5, 500, low=5, per_token=0.25, at_most=1.0, inside=0.5) == [-0.5, 0.5, 0.5]
    assert values(0, 10, 12, 500, high=10, per_token=0.25) == [0.0, 0.0, -0.5, -1.0]
    assert values(8, 9, low=8, high=8, per_token=0.25) == [0.0, -0.25]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "set `low`, `high` or both"),
        ({"low": 9, "high": 3}, "low <= high, got low = 9, high = 3"),
        ({"high": 3, "per_token": 0.0}, "per_token"),
        ({"low": -1}, "low"),
    ],
)
def test_a_bad_config_is_refused(config: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LengthReward.Config(**config)
