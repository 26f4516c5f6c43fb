"""Real offline runs of SwanLab. The tests read the files that it would upload."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rlhf.errors import ConfigError
from rlhf_plugin_swanlab.observer import SwanLabConfig, SwanLabObserver

CHILD = """
import json, sys
from pathlib import Path
from rlhf.interfaces import RunInfo
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_plugin_swanlab.observer import SwanLabConfig, SwanLabObserver
from rlhf_testing.observer import RecordedControl

output, first, last, state = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
row = Row({}, "gsm", 0)
turns = [Turn([1], False, text="2+2?"), Turn([2], True, text="vier")]
groups = [Group(row, 0, [Trajectory(row, turns, (0, 0), rewards={"math": RewardResult(1.0)}, reward=1.0)])]
observer = SwanLabObserver(SwanLabConfig(project="p", mode="offline", samples_every=2))
observer.load_state_dict(state)
config = {"run": {"seed": 1}, "reward": [{"use": "http", "api_key": "config-secret"}]}
observer.check(Path(output))
observer.run_started(RunInfo("my run", Path(output), config, 4, first - 1, RecordedControl()))
print("terminal-secret")
for step in range(first, last + 1):
    observer.rollouts_finished(step, groups)
    observer.step_finished(step, {"reward/mean": step / 4, "time/step": 0.5})
observer.run_ended(sys.argv[5])
print(json.dumps(observer.state_dict()))
"""


def run(folder: Path, first: int, last: int, state: dict, status: str = "finished") -> dict:
    arguments = [str(folder), str(first), str(last), json.dumps(state), status, "--token", "argv-secret"]
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_offline_run_and_its_resume_have_one_id_and_hold_no_secrets(tmp_path):
    pytest.importorskip("swanlab", reason="the package swanlab is not installed")
    state = run(tmp_path, 1, 2, {}, "stopped")
    assert state["run_id"]
    assert run(tmp_path, 2, 3, state, "failed") == state
    folders = sorted((tmp_path / "swanlab").glob("run-*"))
    assert len(folders) == 2
    for folder in folders:
        [record] = folder.glob(f"run-{state['run_id']}.swanlab")
        content = record.read_bytes()
        assert b"reward/mean" in content
        assert b"my run" in content
    assert any("vier" in path.read_text() for path in folders[0].glob("media/text/*"))
    config = (folders[0] / "files" / "config.yaml").read_text()
    assert "<hidden>" in config
    assert "total_steps" in config
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (b"config-secret", b"argv-secret", b"terminal-secret"):
        assert secret not in content


def test_online_without_a_key_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"no API key.*SWANLAB_API_KEY.*mode = \"offline\""):
        SwanLabObserver(SwanLabConfig()).check(tmp_path)
    SwanLabObserver(SwanLabConfig(mode="offline")).check(tmp_path)


def test_without_the_package_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"swanlab is not installed.*rlhf-plugin-swanlab\[swanlab\]"):
        SwanLabObserver(SwanLabConfig()).check(tmp_path)
