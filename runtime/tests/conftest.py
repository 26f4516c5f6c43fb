from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rlhf.plugins import Plugins, Resolved
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf_runtime.calls.main_thread import MainThread


@pytest.fixture
def from_file(tmp_path: Path) -> Callable[..., Resolved]:
    """``from_file("reward", text)`` resolves the component that the text defines, as a user's ``file:`` would be."""

    def resolve(kind: str, text: str) -> Resolved:
        path = tmp_path / f"{kind}_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        return Plugins.discover().resolve(kind, f"file:{path}")

    return resolve


@pytest.fixture
def make_group() -> Callable[..., Group]:
    def make(*answers: str, turn_rewards: tuple[float | None, ...] = (), **columns: Any) -> Group:
        row = Row({"prompt": "1+1=", **columns}, "unit", 7)

        def trajectory(sample: int, answer: str) -> Trajectory:
            turns = [Turn([1, 2], sampled=False, text="1+1=")]
            for n, reward in enumerate(turn_rewards or (None,)):
                turns.append(Turn([3, 4, 5], sampled=True, text=answer, reward=reward, finish="stop"))
                if n + 1 < len(turn_rewards):
                    turns.append(Turn([6], sampled=False, text="?"))
            return Trajectory(row, turns, (3, sample))

        return Group(row, 3, [trajectory(i, a) for i, a in enumerate(answers)])

    return make


@pytest.fixture
def main() -> Iterator[MainThread]:
    thread = MainThread()
    yield thread
    thread.close()
