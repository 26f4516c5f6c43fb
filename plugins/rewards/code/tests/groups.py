"""Groups of answers to score, and the limits of the tests."""

from __future__ import annotations

import asyncio

from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_plugin_code.limits import MIB, ProgramLimits

LIMITS = ProgramLimits(cpu_seconds=1, wall_seconds=30.0, memory=256 * MIB, disk=MIB, output=100_000)


def group(tests, *answers: str, **columns: object) -> Group:
    row = Row({"tests": tests, **columns}, "unit", 0)
    turns = [[Turn([1], False, text="Q:"), Turn([2], True, text=answer)] for answer in answers]
    return Group(row, 0, [Trajectory(row, t, (0, n)) for n, t in enumerate(turns)])


def fenced(program: str) -> str:
    return f"Here it is.\n\n```python\n{program}\n```\n"


def score(reward, tests, program: str, **columns: object) -> RewardResult:
    return asyncio.run(reward.score(group(tests, fenced(program), **columns)))[0]
