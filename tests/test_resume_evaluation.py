"""A run whose evaluation fails loses neither the step before it nor the evaluation: the resume makes it."""

from __future__ import annotations

from typing import Any

import pytest
from rlhf_runtime.checkpoint.store import CheckpointStore

from tests.runs import REWARD, Finished, Workshop, assert_same_run

JUDGE = """
from pathlib import Path


async def judge(prompt, completion, row):
    if row.get("held_out") and Path({down!r}).exists():
        raise ConnectionError("the judge is down")
    return sum(c in "0123456789" for c in completion) / 6
"""
RAISES = """
from pathlib import Path
from rlhf.interfaces import Observer


class Raises(Observer):
    name = "raises"

    def step_finished(self, step, metrics):
        if Path({down!r}).exists() and step == 2:
            raise ConnectionError("the server is down")
"""


def evaluated(shop: Workshop, every: int) -> dict[str, Any]:
    """A run of four steps whose metric falls, so that its first evaluation is the best."""
    held_out = shop.rows("held_out.jsonl", [{"prompt": f"{n}+1=", "answer": "1", "held_out": 1} for n in range(4)])
    judge = shop.file("judge.py", JUDGE.format(down=str(shop.folder / "down")))
    return {
        "run": {"steps": 4},
        "data": {"eval": str(held_out)},
        "eval": {"every": every, "metric": "length", "mode": "max", "temperature": 1.0, "patience": 9},
        "reward": [{"use": f"file:{judge}"}],
        "stream": {"staleness": 1},
    }


def assert_same_evaluations(resumed: Finished, baseline: Finished) -> None:
    assert resumed.lines() == baseline.lines()
    assert resumed.weights == baseline.weights
    best, expected = (CheckpointStore(run.path).best() for run in (resumed, baseline))
    assert best is not None
    assert expected is not None
    assert best.step == expected.step
    pointers = [(run.path / "checkpoints" / "best.json").read_text() for run in (resumed, baseline)]
    assert pointers[0] == pointers[1]


@pytest.mark.parametrize("every", [pytest.param(2, marks=pytest.mark.full), 4], ids=["inside the run", "at its end"])
def test_an_evaluation_that_failed_is_made_by_the_resume(shop: Workshop, every: int) -> None:
    settings = evaluated(shop, every)
    baseline = shop.train("rloo", "whole", **settings)
    (shop.folder / "down").touch()
    for flags in ([], ["--resume"]):
        broken = shop.run("rloo", "broken", *flags, **settings)
        assert broken.code == 1
        assert "the judge is down" in broken.said
        assert [c.step for c in CheckpointStore(broken.path).complete()] == [every]
    (shop.folder / "down").unlink()
    assert_same_evaluations(resumed := shop.train("rloo", "broken", "--resume", **settings), baseline)
    assert "has no line for" not in resumed.said
    if every == 2:
        assert_same_run(resumed, baseline)
    assert_same_evaluations(shop.train("rloo", "broken", "--resume", **settings), baseline)


def test_the_best_checkpoint_is_marked_where_an_observer_fails_after_the_evaluation(shop: Workshop) -> None:
    down = shop.folder / "down"
    observer = shop.file("raises.py", RAISES.format(down=str(down)))
    reward = [{"use": f"file:{shop.file('reward.py', REWARD)}"}]
    settings = {**evaluated(shop, 2), "observer": [{"use": f"file:{observer}"}], "reward": reward}
    baseline = shop.train("rloo", "whole", **settings)
    down.touch()
    broken = shop.run("rloo", "broken", **settings)
    assert broken.code == 1
    assert "the server is down" in broken.said
    down.unlink()
    assert_same_evaluations(shop.train("rloo", "broken", "--resume", **settings), baseline)


def test_a_resume_that_fails_after_the_missing_evaluation_loses_nothing(shop: Workshop) -> None:
    """The step has a checkpoint already, so nothing is saved again."""
    down, failing = shop.folder / "down", shop.folder / "failing"
    observer = shop.file("raises.py", RAISES.format(down=str(failing)))
    settings = {**evaluated(shop, 2), "observer": [{"use": f"file:{observer}"}]}
    baseline = shop.train("rloo", "whole", **settings)
    down.touch()
    assert shop.run("rloo", "broken", **settings).code == 1
    down.unlink()
    failing.touch()
    broken = shop.run("rloo", "broken", "--resume", **settings)
    assert "the server is down" in broken.said
    assert "what was learnt" not in broken.said
    failing.unlink()
    assert_same_evaluations(shop.train("rloo", "broken", "--resume", **settings), baseline)
