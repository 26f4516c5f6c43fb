"""The timeline of whole runs on the simulated runtime."""

from __future__ import annotations

import json
from collections import Counter
from statistics import fmean
from typing import Any

import pytest
from rlhf_runtime.output.metrics import read_metrics

from tests.continuous import simulated
from tests.forks import Forks
from tests.runs import Finished, Workshop
from tests.timelines import Slice, events, slices

WAITS = """
import asyncio
from pathlib import Path


async def score(prompt, completion, row):
    while int(row["answer"]) >= 4 and Path({marker!r}).exists():
        await asyncio.sleep(0.01)
    return float(len(completion) % 2)
"""
"""The rewards of the second step wait for as long as the file exists."""
FAILING_REWARD = """
async def score(prompt, completion, row):
    assert int(row["answer"]) % 5 != 3
    return 0.0
"""
FAILING_ENV = """
from rlhf.interfaces import Env
from rlhf.types import EnvStep


class Failing(Env):
    async def reset(self, row, seed):
        self.row, self.steps = row, 0
        return ""

    async def step(self, action):
        self.steps += 1
        assert self.row.index % 5 != 2 or self.steps < 2
        return EnvStep("?", float(len(action) > 1), done=self.steps == 2)
"""


def run_of(shop: Workshop, **changes: Any) -> Finished:
    return shop.train_config(simulated(shop, "run", **changes))


def recorded(run: Finished) -> list[Slice]:
    entries: list[dict[str, Any]] = json.loads((run.path / "timeline.json").read_text())
    return slices(entries)


def select(timeline: list[Slice], *path: str) -> list[Slice]:
    return [s for s in timeline if s.path[-len(path) :] == path]


STREAMS = {
    "waves": {"stream": {"mode": "waves", "staleness": None}},
    "continuous": {"stream": {"staleness": 1}, "sync": {"in_flight": "continue"}},
}


@pytest.fixture(scope="module", params=STREAMS)
def run(request: pytest.FixtureRequest, tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Four steps with a timeline, in waves and in a continuous stream."""
    shop = Workshop(tmp_path_factory.mktemp("timeline"), tiny.model, tiny.data)
    return run_of(shop, **STREAMS[request.param], run={"steps": 4, "timeline": 10}, data={"batch_size": 4})


def test_every_turn_of_a_run_is_in_its_timeline(run: Finished) -> None:
    timeline = recorded(run)
    turns = {(s.arguments["group"], s.arguments["sample"], s.arguments["turn"]): s for s in select(timeline, "turn")}
    trained = {
        (sample["group"], sample["sample"], n): turn
        for sample in run.samples()
        for n, turn in enumerate(turn for turn in sample["turns"] if turn["sampled"])
    }
    assert set(turns) == set(trained)
    assert len(turns) == 4 * 4 * 2 * 2, "steps, groups, samples and turns"
    for key, turn in trained.items():
        assert turns[key].arguments["tokens"] == len(turn["ids"])
        assert turns[key].arguments["versions"] == [version for _, version in turn["versions"]]
        assert turns[key].path == ("samples", "sample", "turn")
    assert Counter(s.path[-1] for s in timeline if s.path[0] == "samples") == {
        "sample": 32,
        "turn": 64,
        "environment reset": 32,
        "environment step": 64,
        "environment close": 32,
    }
    assert sorted(s.arguments["group"] for s in select(timeline, "rewards")) == list(range(16))


def test_the_driver_s_phases_are_inside_their_steps(run: Finished) -> None:
    driver = [s for s in recorded(run) if s.path[0] == "driver"]
    assert len({s.track for s in driver}) == 1
    for step in range(1, 5):
        phases = [s.path[2:] for s in driver if s.path[1] == f"step {step}"]
        saved = [("save",)] if step % 2 == 0 else []
        annotated = [("learn", "annotate")] if ("learn", "annotate") in phases else []
        assert phases == [("generate",), *annotated, ("learn",), ("sync",), *saved, ()]
    entries = events(run.path / "timeline.json")
    instants = [(e["name"], e.get("args", {})) for e in entries if e["ph"] == "i"]
    assert [arguments["version"] for name, arguments in instants if name == "weights"] == [0, 1, 2, 3, 4]
    assert [arguments["step"] for name, arguments in instants if name == "checkpoint"] == [2, 4]


def test_tokens_that_are_not_trained_on_are_counted_by_cause(shop: Workshop) -> None:
    """All tokens that were sampled, as the timeline has them, are trained on or thrown away for a reason."""
    config = simulated(
        shop,
        "run",
        run={"steps": 3, "timeline": 10},
        stream={"on_failed_sample": "drop_group", "max_failed": 1.0, "filter": {"min_std": 0.1, "max_rounds": 50}},
        env=None,
        reward=[{"use": f"file:{shop.file('fails.py', FAILING_REWARD)}"}],
    )
    config["env"] = {"use": f"file:{shop.file('env.py', FAILING_ENV)}"}
    run = shop.train_config(config)
    sampled = sum(s.arguments["tokens"] for s in select(recorded(run), "turn"))
    trained = sum(len(t["ids"]) for sample in run.samples() for t in sample["turns"] if t["sampled"])
    lost = Counter[str]()
    for line in run.lines():
        lost.update({name: value for name, value in line.items() if name.startswith("stream/tokens_")})
    assert lost["stream/tokens_failed"] > 0
    assert lost["stream/tokens_filtered"] > 0
    assert trained + sum(lost.values()) == sampled
    names = Counter(e["name"] for e in events(run.path / "timeline.json") if e["ph"] == "i")
    for name, metric in (("group failed", "failed_groups"), ("group filtered", "filtered")):
        assert names[name] == sum(line[f"stream/{metric}"] for line in run.lines()) > 0


def test_the_timeline_of_a_killed_run_can_be_read_and_a_resume_continues_it(shop: Workshop, forks: Forks) -> None:
    marker, output = shop.file("wait", ""), shop.folder / "run/timeline.json"
    reward = [{"use": f"file:{shop.file('waits.py', WAITS.format(marker=str(marker)))}", "deadline": 600.0}]
    config = simulated(
        shop,
        "run",
        run={"steps": 2, "timeline": 10},
        data={"shuffle": False},
        checkpoint={"every": 1},
        reward=reward,
    )
    process = forks.start(shop.arguments(config))
    process.until(lambda: output.exists() and "step 1" in [e.get("name") for e in events(output)])
    process.kill()
    assert process.wait() == -9
    killed = events(output)
    old_timeline = slices(killed)
    assert len(select(old_timeline, "step 1", "learn")) == 1
    assert select(old_timeline, "turn")
    marker.unlink()
    shop.train_config(config, "--run.resume")
    entries = json.loads(output.read_text())
    assert entries[: len(killed)] == killed
    after = [s.path for s in slices(entries)]
    assert ("driver, start 2", "step 2", "learn") in after
    assert ("driver, start 2", "step 1") not in after


def test_a_run_whose_timeline_cannot_be_opened_goes_on(shop: Workshop) -> None:
    (run_of(shop, run={"steps": 1, "timeline": None}).path / "timeline.json").mkdir()  # there is no such file
    run = shop.train_config(simulated(shop, "run", run={"steps": 2, "timeline": 1}), "--run.resume")
    assert "note: there is no timeline of this start:" in run.said
    assert [line["step"] for line in run.lines()] == [1, 2]


def test_only_the_steps_that_were_asked_for_are_recorded(shop: Workshop) -> None:
    run = run_of(shop, run={"steps": 4, "timeline": 2})
    steps = [s.path[1] for s in recorded(run) if s.path[0] == "driver" and len(s.path) == 2]
    assert steps == ["step 1", "step 2"]


def test_the_share_of_idle_engines_is_reported_by_the_continuous_stream(run: Finished, request) -> None:
    if request.node.callspec.params["run"] == "waves":
        assert "stream/idle" not in run.lines()[0]
    else:
        assert all(0.0 <= line["stream/idle"] <= 1.0 for line in run.lines())


def test_a_plan_of_step_times_is_made_from_a_run(shop: Workshop, run: Finished) -> None:
    lines = read_metrics(run.path / "metrics.jsonl")[1:]
    flags = ["plan", str(run.path.with_suffix(".toml")), "--speeds", str(run.path), "--json"]
    times = json.loads(shop.command(*flags, "--device", "cpu", "--device-memory", "64GiB").out)["step_time"]
    first, *alternatives = times["layouts"]
    assert first["learn"] == pytest.approx(fmean(line["time/learn"] for line in lines))
    assert [layout["name"] for layout in alternatives] == [
        name
        for name in ("waves, staleness 0", "waves, staleness 1", *(f"continuous, staleness {s}" for s in (0, 1, 2, 4)))
        if name != first["name"]
    ]
    samples = [s.arguments["tokens"] for s in select(recorded(run), "sample") if s.arguments["step"] > 1]
    assert 0 < times["speeds"]["tokens"] - fmean(samples) < 60, "prompts and what the environment says are counted too"
    waves, continuous = (next(e for e in times["layouts"] if e["name"] == f"{m}, staleness 1") for m in STREAMS)
    assert waves["step"] > continuous["step"] >= continuous["learn"]
