"""A plugin that wants to end the process fails the run, with the line that did it and an exit code other than 0."""

from __future__ import annotations

import re

import pytest

REWARD = "async def score(prompt, completion, row):\n    raise SystemExit(0)\n"
ROLLOUT = """
from rlhf.interfaces import Rollout

class Play(Rollout):
    def check(self):
        raise ValueError("no file")

    async def run(self, row, seed, ctx):
        return []
"""
OBSERVER = """
from rlhf.interfaces import Observer

class Watch(Observer):
    def {hook}(self, *arguments):
        raise SystemExit(0)
"""


@pytest.mark.parametrize("hook", ["run_started", "state_dict"])
def test_an_observer_that_exits_ends_the_run_with_its_line(shop, hook: str) -> None:
    file = shop.file("watch.py", OBSERVER.format(hook=hook))
    run = shop.run("sft", "run", observer=[{"use": f"file:{file}"}])
    assert run.code == 1
    assert re.search(rf"SystemExit: 0 \({file}:6\)", run.err)


@pytest.mark.parametrize(
    ("hook", "label"), [("check", "observer 'watch', check"), ("state_dict", r"state_dict\(\) of observer.watch")]
)
def test_an_observer_that_raises_outside_of_an_event_is_named(shop, hook: str, label: str) -> None:
    file = shop.file("watch.py", OBSERVER.format(hook=hook).replace("SystemExit(0)", "ValueError('no login')"))
    run = shop.run("sft", "run", observer=[{"use": f"file:{file}"}])
    assert run.code == 1
    assert re.search(rf"{label} raised ValueError: no login \({file}:6\)", run.err)


def test_a_rollout_whose_check_raises_is_named(shop) -> None:
    file = shop.file("play.py", ROLLOUT)
    run = shop.run("rloo", "run", rollout={"use": f"file:{file}"})
    assert run.code == 1
    assert re.search(rf"check\(\) of rollout 'file:{file}' raised ValueError: no file \({file}:6\)", run.err)


@pytest.mark.parametrize("hook", ["run_started", "step_finished", "run_ended"])
def test_a_run_goes_on_without_an_optional_observer_that_fails_after_the_start(shop, hook: str) -> None:
    file = shop.file("watch.py", OBSERVER.format(hook=hook))
    run = shop.run("sft", "run", observer=[{"use": f"file:{file}", "on_error": "warn"}], run={"steps": 2})
    assert run.code == (hook == "run_started")
    notes = run.said.count("The run continues without this observer")
    assert notes == (hook != "run_started")
    assert len(run.lines()) == (0 if hook == "run_started" else 2)


ENDS = """
from pathlib import Path
from rlhf.interfaces import Observer
class Ends(Observer):
    name = "ends"
    def step_finished(self, step, metrics):
        if {raises} and step == 2:
            raise ValueError("the server is gone")
    def run_ended(self, status):
        if {raises}:
            raise ValueError("it is still gone")
        Path(__file__).with_suffix(".txt").write_text(status)
"""


def test_an_observer_whose_end_fails_hides_neither_the_first_error_nor_the_end_from_others(shop) -> None:
    files = [shop.file(f"{name}.py", ENDS.format(raises=name == "first")) for name in ("first", "second")]
    run = shop.run("sft", "run", observer=[{"use": f"file:{file}"} for file in files])
    assert run.code == 1
    assert "rlhf: observer 'first', step_finished raised ValueError: the server is gone" in run.err
    assert "observer 'first', run_ended raised ValueError: it is still gone" in run.said
    assert files[1].with_suffix(".txt").read_text() == "failed"


def test_a_reward_that_exits_fails_its_sample(shop) -> None:
    file = shop.file("exits.py", REWARD)
    run = shop.run("rloo", "run", reward=[{"use": f"file:{file}"}])
    assert run.code == 1
    assert re.search(rf"reward 'exits' .*score\(\) raised SystemExit: 0 \({file}:2\)", run.err)
