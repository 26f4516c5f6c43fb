"""A run that is killed at any moment and resumed ends bit-equal to an uninterrupted run."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks, Process
from tests.runs import Finished, Workshop, assert_same_run, merged

STEPS = 5
GAME = {"rollout": {"use": "multi_turn"}, "env": {"use": "number_game", "max_turns": 3}}
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {
        "algorithm": {"epochs": 2, "minibatches": 2, "critic_warmup": 1, "kl": {"coef": 0.1, "target": 0.01}},
        "trainer": {"schedule": "cosine", "warmup_steps": 2},
    },
    "reinforce_pp": {
        **merged(GAME, {"env": {"credit": "step"}}),
        "trainer": {"ema_decay": 0.9, "schedule": "linear"},
    },
    "grpo": {
        "algorithm": {"kl": {"coef": 0.1, "where": "loss"}},
        "eval": {"every": 2, "samples": 2, "temperature": 1.0},
    },
    "rloo": {"policy": {"dtype": "bf16"}, "data": {"shuffle": True, "batch_size": 5}},
    "sft": {"run": {"threads": 2}, "trainer": {"schedule": "cosine"}, "eval": {"every": 2, "patience": 9}},
}
"""Runs with further state: adaptive KL, critic, schedule, moving average, best value, episodes, mixing. One run has two
threads, and one computes in bf16."""

KILLER = """
import os, signal
from rlhf.interfaces import Observer


class Killer(Observer):
    '''Kills the process in the event that the file `die` in the run directory names. In saving, state is requested
    after the weights were written and before the checkpoint is complete.'''

    name = "killer"

    def run_started(self, info):
        self.marker = info.output / "die"

    def die(self, event):
        if self.marker.exists() and self.marker.read_text() == event:
            self.marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def state_dict(self):
        if list((self.marker.parent / "checkpoints").glob(".saving-*")):
            self.die("saving")
        return {}

    def rollouts_finished(self, step, groups):
        self.die(f"rollouts {step}")

    def step_finished(self, step, metrics):
        self.die(f"step {step}")

    def checkpoint_saved(self, step, path):
        self.die(f"saved {step}")

    def run_ended(self, status):
        self.die("ended")
"""

MOVING = """
from rlhf.interfaces import Slot
from rlhf_algorithms.policy_gradient import PolicyGradient
from rlhf.types import Snapshot


class Moving(PolicyGradient):
    name = "moving"
    slots = PolicyGradient.slots | {"advantage": Slot("advantage", "rloo"), "loss": Slot("loss", "ppo")}

    def updates(self, step, batch=None):
        return [*super().updates(step, batch), *([Snapshot("reference", "policy")] if step == 2 else [])]
"""
"""The reference becomes a copy of the policy after the third step."""


def config(shop: Workshop, name: str, output: str, staleness: int = 0, **changes: Any) -> dict[str, Any]:
    base = shop.config(
        name,
        output,
        run={"steps": STEPS},
        checkpoint={"every": 2, "keep": 2},
        observer=[{"use": f"file:{shop.file('killer.py', KILLER)}"}],
    )
    settings = merged(merged(base, VARIANTS.get(name, {})), changes)
    if "eval" in settings:
        settings["data"]["eval"] = [{"path": str(shop.data), "max_rows": 3, "name": "held_out"}]
    if name == "rloo":
        shares = {"one": 0.25, "two": 0.75}
        settings["data"]["train"] = [
            {"path": str(shop.data), "name": label, "probability": share} for label, share in shares.items()
        ]
    return merged(settings, {"stream": {"staleness": staleness}}) if staleness else settings


class Runs:
    """Runs in processes of their own, in the folder of one test."""

    def __init__(self, forks: Forks, shop: Workshop) -> None:
        self.forks, self.shop = forks, shop

    def start(self, run: dict[str, Any], *flags: str) -> Process:
        return self.forks.start(self.shop.arguments(run, *flags))

    def end(self, run: dict[str, Any], *flags: str) -> Finished:
        return self.result(run, self.start(run, *flags))

    def result(self, run: dict[str, Any], process: Process) -> Finished:
        return Finished(Path(run["run"]["output"]), process.wait(), err=process.output)

    def die_at(self, run: dict[str, Any], event: str, *flags: str) -> Path:
        """Run until the process kills itself in ``event``; its folder."""
        output = Path(run["run"]["output"])
        output.mkdir(exist_ok=True)
        (output / "die").write_text(event)
        dead = self.end(run, *flags)
        assert dead.code == -signal.SIGKILL, dead.err
        return output

    def resume(self, run: dict[str, Any]) -> Finished:
        finished = self.end(run, "--resume")
        assert finished.code == 0, finished.err
        return finished


@pytest.fixture
def runs(forks: Forks, shop: Workshop) -> Runs:
    return Runs(forks, shop)


def lines_written(output: Path) -> int:
    path = output / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


KILLED = [
    ("sft", 0), ("ppo", 0), ("grpo", 2),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (("ppo", 2), ("grpo", 0))),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "staleness"), KILLED)
def test_killed_at_a_random_moment_and_again_inside_saving(runs: Runs, algorithm: str, staleness: int) -> None:
    chance = random.Random(f"{algorithm} {staleness}")
    often = {"checkpoint": {"every": 1}}
    baseline, broken = (config(runs.shop, algorithm, name, staleness, **often) for name in ("whole", "broken"))
    reference, victim = runs.start(baseline), runs.start(broken)
    output = Path(broken["run"]["output"])
    lines = chance.randint(2, STEPS - 1)
    victim.until(lambda: lines_written(output) >= lines)
    time.sleep(chance.uniform(0, 0.05))
    victim.kill()
    assert victim.wait() == -signal.SIGKILL, victim.output

    runs.die_at(broken, "saving", "--resume")
    half = list((output / "checkpoints").glob(".saving-step-*"))
    assert [path.name for path in half[0].rglob("model.safetensors")], "it died while a checkpoint was half written"

    finished = runs.resume(broken)
    assert "resumed after step" in finished.err, "it continued from a checkpoint"
    assert_same_run(finished, expected := runs.result(baseline, reference))
    assert expected.code == 0, expected.err
    assert not list((output / "checkpoints").glob(".saving-*"))


MOMENTS = {
    "before the first checkpoint": "step 1",
    "between rollouts and metrics": "rollouts 4",
    "between metrics and checkpoint": "step 4",
    "right after a checkpoint": "saved 4",
    "after the last step, before the model is exported": "saved 5",
}


@pytest.mark.parametrize("event", MOMENTS.values(), ids=MOMENTS.keys())
def test_killed_at_every_kind_of_moment(runs: Runs, whole: Finished, event: str) -> None:
    broken = config(runs.shop, "grpo", "broken", 2)
    runs.die_at(broken, event)
    assert_same_run(runs.resume(broken), whole)


@pytest.fixture(scope="module")
def whole(forks: Forks, tiny: Workshop) -> Finished:
    """The uninterrupted runs, which the killed ones must equal."""
    reference = Runs(forks, tiny).end(config(tiny, "grpo", "reference", 2))
    assert reference.code == 0, reference.err
    return reference


def test_resuming_a_finished_run_changes_nothing(runs: Runs) -> None:
    run = config(runs.shop, "sft", "run")
    first = runs.end(run)
    weights, lines = first.weights, first.lines()
    after = runs.resume(run)
    assert (after.weights, after.lines()) == (weights, lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_saves_and_exits(runs: Runs, number: signal.Signals) -> None:
    baseline, broken = (config(runs.shop, "grpo", name, 2, checkpoint={"every": 100}) for name in ("whole", "broken"))
    reference, stopped = runs.start(baseline), runs.start(broken)
    output = Path(broken["run"]["output"])
    stopped.until(lambda: lines_written(output) >= 1)
    stopped.kill(number)
    partial = runs.result(broken, stopped)
    assert partial.code == 128 + number, partial.err
    assert f"{number.name}: stopping after this step, with a checkpoint" in partial.err
    done = partial.lines()[-1]["step"]
    assert 1 <= done < STEPS
    assert partial.last_checkpoint.name == f"step-{done:06d}"
    (start,) = json.loads((output / "manifest.json").read_text())["starts"]
    assert (start["ended"]["status"], start["ended"]["why"]) == ("stopped", number.name)
    assert_same_run(runs.resume(broken), runs.result(baseline, reference))


def test_a_signal_in_the_last_step_exits_with_0(runs: Runs) -> None:
    """The run is complete, so a command after `rlhf train ... &&` may start."""
    stopper = """
import os, signal
from rlhf.interfaces import Observer


class Stopper(Observer):
    name = "stopper"

    def step_finished(self, step, metrics):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
"""
    observer = [{"use": f"file:{runs.shop.file('stopper.py', stopper)}"}]
    run = config(runs.shop, "sft", "run", run={"steps": 2}, observer=observer)
    result = runs.end(run)
    assert "SIGTERM: stopping after this step" in result.err
    assert (result.code, len(result.lines())) == (0, 2)


@pytest.mark.full
def test_a_run_that_stopped_early_stays_stopped(runs: Runs) -> None:
    """A run that is killed between its last checkpoint and its end must not train further when it is resumed."""
    patient = {"eval": {"patience": 1, "every": 1, "metric": "eval/loss", "mode": "max"}}  # the loss falls: no progress
    baseline, broken = (config(runs.shop, "sft", name, 0, **patient) for name in ("whole", "broken"))
    reference = runs.end(baseline)
    steps = len(reference.lines())
    assert steps < STEPS
    runs.die_at(broken, f"saved {steps}")
    assert_same_run(runs.resume(broken), reference)


def test_a_resume_cuts_records_after_the_checkpoint(runs: Runs) -> None:
    run = config(runs.shop, "rloo", "run")
    output = runs.die_at(run, "step 5")  # checkpoint 4 is the newest
    assert lines_written(output) == 5
    (output / "die").write_text("rollouts 5")
    killed = runs.end(run, "--resume")
    assert killed.code == -signal.SIGKILL
    assert [line["step"] for line in killed.lines()] == [1, 2, 3, 4]
    starts = json.loads((output / "manifest.json").read_text())["starts"]
    assert [start["first_step"] for start in starts] == [0, 4]


def test_a_resume_counts_updates_before_the_kill(runs: Runs) -> None:
    """A resumed run without updates is not an error if there were updates before the kill."""
    rows = [{"prompt": "1+1=", "answer": "2"}, *[{"prompt": "1+1=", "answer": "never"}] * 4]
    reward = (
        "async def score(prompt, completion, row):\n    return -1.0 if row['answer'] == 'never' else len(completion)\n"
    )
    run = config(
        runs.shop,
        "rloo",
        "run",
        reward=[{"use": f"file:{runs.shop.file('never.py', reward)}"}],
        data={"shuffle": False, "batch_size": 1},
        stream={"filter": {"low": -0.5, "max_rounds": 1}},
        run={"steps": 3},
    )
    run["data"]["train"] = str(runs.shop.rows("rows.jsonl", rows))
    runs.die_at(run, "saved 2")
    finished = runs.resume(run)
    assert [line.get("empty") for line in finished.lines()] == [None, 1.0, 1.0]


@pytest.mark.full
def test_a_reference_that_follows_the_policy_is_in_the_checkpoint(runs: Runs) -> None:
    moving = {
        "algorithm": {"use": f"file:{runs.shop.file('moving.py', MOVING)}", "kl": {"coef": 0.1, "where": "loss"}},
        "env": {"credit": "outcome"},  # rloo compares whole episodes
    }
    baseline, broken = (config(runs.shop, "reinforce_pp", name, **moving) for name in ("whole", "broken"))
    reference = runs.start(baseline)
    runs.die_at(broken, "saved 4")
    assert (Path(broken["run"]["output"]) / "checkpoints/step-000004/roles/reference/model.safetensors").exists()
    finished = runs.resume(broken)
    assert_same_run(finished, runs.result(baseline, reference))
    assert finished.lines()[-1]["policy/kl_reference"] != 0
