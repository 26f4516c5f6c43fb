"""Whole runs of the continuous stream on the simulated runtime, and what must hold of each."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tests.runs import Finished, Workshop, merged

SPEED = 200.0
"""Simulated seconds per second."""
ROWS = 400
BREAKS = """
import asyncio
from pathlib import Path


async def score(prompt, completion, row):
    marker = Path({marker!r})
    if marker.exists():
        left = int(marker.read_text())
        marker.write_text(str(left - 1))
        if left == 0:
            marker.unlink()
            raise RuntimeError("the reward broke")
    return 0.0
"""
DEALS = """
from pathlib import Path
from rlhf.interfaces import Curriculum


class Deals(Curriculum):
    '''Deals rows 0, 1, 2, ... and raises where it is told of a group that it did not deal, or twice of one.'''

    name = "deals"

    def setup(self, rows, seed, total_steps):
        self.dealt, self.told, self.steps = 0, set(), [-1, -1]

    def choose(self, n, step):
        assert step >= self.steps[0], "steps go back"
        self._write(f"choose {n} {step}")
        self.steps[0], self.dealt = step, self.dealt + n
        return list(range(self.dealt - n, self.dealt))

    def finished(self, groups):
        rows = [group.row for group in groups]
        assert {group.step for group in groups} == {self.steps[1] + 1}, "batches come in order"
        assert len(set(rows)) == len(rows) and not self.told & set(rows), "told twice"
        assert all(row < self.dealt for row in rows), "told of a row that was not dealt"
        assert [group.number for group in groups] == sorted(group.number for group in groups)
        kept = sum(group.outcome == "kept" for group in groups)
        self._write(f"finished {kept}")
        self.told |= set(rows)
        self.steps[1] += 1

    def metrics(self):
        return {"dealt": float(self.dealt)}

    def state_dict(self):
        return {"dealt": self.dealt, "told": sorted(self.told), "steps": list(self.steps)}

    def load_state_dict(self, state):
        self.dealt, self.told, self.steps = state["dealt"], set(state["told"]), list(state["steps"])

    def _write(self, line):
        with Path(__file__).with_suffix(".log").open("a") as file:
            file.write(line + "\\n")
"""


def simulated(shop: Workshop, output: str, **changes: Any) -> dict[str, Any]:
    """A run file of six steps on the simulated runtime."""
    data = shop.folder / "many.jsonl"
    if not data.exists():
        shop.rows("many.jsonl", [{"prompt": f"{n}=", "answer": str(n)} for n in range(ROWS)])
    base = {
        "run": {"steps": 6, "output": str(shop.folder / output)},
        "data": {"train": str(data), "batch_size": 4, "max_tokens": 400},
        "sampling": {"samples_per_prompt": 2, "max_new_tokens": 60},
        "launcher": {"use": "simulated"},
        "trainer": {"use": "simulated", "seconds": 1.0, "speed": SPEED, "lr": None},
        "generator": {"use": "simulated", "tokens": 20.0, "engines": 2, "slots": 4, "speed": SPEED},
        "rollout": {"use": "multi_turn"},
        "env": {"use": "simulated", "turns": 2, "slow_share": 0.05, "speed": SPEED},
        "reward": None,
        "stream": {"mode": "continuous", "staleness": 1},
        "checkpoint": {"every": 2},
    }
    return shop.config("grpo", output, **merged(base, changes))


def drawn(seed: int) -> dict[str, Any]:
    """Random options of the stream."""
    draw = random.Random(seed)
    staleness = draw.randrange(4)
    stream: dict[str, Any] = {
        "staleness": staleness,
        "order": draw.choice(["submission", "completion"]),
        "filter": draw.choice([None, {"min_std": 0.1, "max_rounds": 50}]),
    }
    if draw.random() < 0.5:
        stream["oversample"] = 1.0 + draw.random() * staleness
    return {
        "run": {"seed": draw.randrange(1000), "steps": draw.randint(3, 7)},
        "data": {"batch_size": draw.randint(1, 5)},
        "stream": stream,
        "sync": {"in_flight": draw.choice(["continue", "drain", "restart"]), "canaries": 0},
        "trainer": {"seconds": draw.choice([0.0, 0.5, 3.0])},
        "generator": {"deaths": draw.choice([0.0, 0.1]), "engines": draw.randint(1, 3), "slots": draw.randint(1, 5)},
        "env": {"turns": draw.randint(1, 3), "slow": draw.choice([1.0, 8.0])},
    }


def groups_of(run: Finished) -> Iterator[tuple[int, int, int, int]]:
    """(step from 0, group's number, row, oldest version of its tokens) of everything that was trained on."""
    for line, name in zip(run.lines(), sorted(run.rollouts()), strict=True):
        groups: dict[int, tuple[int, int]] = {}
        for sample in run.samples_of(name):
            versions = [v for turn in sample["turns"] if turn["sampled"] for _, v in turn["versions"]]
            row, oldest = groups.get(sample["group"], (sample["row"]["index"], 10**9))
            groups[sample["group"]] = row, min([oldest, *versions])
        for number, (row, oldest) in groups.items():
            yield line["step"] - 1, number, row, oldest


def check_ledger(run: Finished, config: dict[str, Any]) -> None:
    """No prompt is lost or trained on twice, and no token is older than staleness allows."""
    groups, lines, size = list(groups_of(run)), run.lines(), config["data"]["batch_size"]
    numbers, rows = [number for _, number, _, _ in groups], [row for _, _, row, _ in groups]
    assert len(set(numbers)) == len(numbers), "a group was trained on twice"
    assert len(set(rows)) == len(rows), "a row was trained on twice in one pass over the data"
    for step, number, _, oldest in groups:
        assert step - oldest <= config["stream"]["staleness"], (step, number, oldest)
    assert {line["stream/stale"] for line in lines} == {0.0}, "more groups were started than staleness allows"
    total = {name: sum(line[f"stream/{name}"] for line in lines) for name in ("prompts", "filtered", "failed_groups")}
    assert total["prompts"] == len(groups) + total["filtered"] + total["failed_groups"], "a prompt was lost"
    assert len(groups) + sum(line["stream/short"] for line in lines) == size * len(lines)
    assert [line["step"] for line in lines] == list(range(1, config["run"]["steps"] + 1))
    if config["stream"].get("order", "submission") == "submission":
        assert numbers == sorted(numbers)
    if config.get("curriculum"):
        check_dealt(run, set(rows))


def check_dealt(run: Finished, trained: set[int]) -> None:
    """Every row that the curriculum dealt was told to it or is pending, in the last checkpoint."""
    state = json.loads((run.last_checkpoint / "state.json").read_text())
    deals, stream = state["components"]["curriculum"], state["stream"]
    feedback, rejects = set(deals["told"]), [group["row"] for group in stream["chosen"]["rejected"]]
    assert trained <= feedback
    assert (
        deals["dealt"] == len(feedback) + len(rejects) + len(stream["pending"]) == stream["rows"]["order"]["drawn"][0]
    )
    assert deals["steps"][1] == state["step"] - 1
