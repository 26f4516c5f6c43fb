"""Real runs of trackio in a folder. The tests read its database."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from rlhf.errors import ConfigError
from rlhf_plugin_trackio.observer import TrackioConfig, TrackioObserver

CHILD = """
import json, sys
from pathlib import Path
from rlhf.interfaces import RunInfo
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_plugin_trackio.observer import TrackioConfig, TrackioObserver
from rlhf_testing.observer import RecordedControl

output, first, last, state = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
row = Row({}, "gsm", 0)
turns = [Turn([1], False, text="2+2?"), Turn([2], True, text="vier")]
groups = [Group(row, 0, [Trajectory(row, turns, (0, 0), rewards={"math": RewardResult(1.0)}, reward=1.0)])]
observer = TrackioObserver(TrackioConfig(project="p", samples_every=2))
observer.load_state_dict(state)
config = {"run": {"seed": 1}, "reward": [{"use": "http", "api_key": "config-secret"}]}
observer.check(Path(output))
observer.run_started(RunInfo("my run", Path(output), config, 4, first - 1, RecordedControl()))
for step in range(first, last + 1):
    observer.rollouts_finished(step, groups)
    observer.step_finished(step, {"reward/mean": step / 4, "time/step": 0.5})
observer.run_ended("finished")
print(json.dumps(observer.state_dict()))
"""


def run(folder: Path, first: int, last: int, state: dict) -> dict:
    """A run in a process of its own: trackio reads its folder when it is imported."""
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}
    arguments = [str(folder), str(first), str(last), json.dumps(state)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def rows(folder: Path, text: str) -> list:
    with sqlite3.connect(folder / "trackio" / "p.db") as connection:
        return connection.execute(text).fetchall()


def test_a_run_and_its_resume_are_one_run_with_metrics_samples_and_a_config_without_secrets(tmp_path):
    pytest.importorskip("trackio", reason="the package trackio is not installed")
    state = run(tmp_path, 1, 3, {})
    assert run(tmp_path, 3, 4, state) == state
    lines = [(step, json.loads(text)) for step, text in rows(tmp_path, "select step, metrics from metrics order by id")]
    assert [(step, line["reward/mean"]) for step, line in lines] == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75), (4, 1)]
    assert ["rollouts" in line for _, line in lines] == [True, False, True, True, False]
    assert len({name for (name,) in rows(tmp_path, "select run_id from metrics")}) == 1
    [(config,), *_] = rows(tmp_path, "select config from configs")
    assert b"<hidden>" in config
    assert b"total_steps" in config
    holders = [p for p in tmp_path.rglob("*") if p.is_file() and b"config-secret" in p.read_bytes()]
    assert holders == []


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trackio is not installed.*rlhf-plugin-trackio\[trackio\]"):
        TrackioObserver(TrackioConfig()).check(tmp_path)
