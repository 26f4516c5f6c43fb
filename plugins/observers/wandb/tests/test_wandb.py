"""Real offline runs of wandb. The tests read the data for the upload from its files."""

import json
import struct
import sys
from pathlib import Path

import pytest
import wandb
from rlhf.errors import ConfigError
from rlhf.interfaces import RunInfo
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_plugin_wandb.observer import WandbConfig, WandbObserver
from rlhf_testing.observer import ObserverContract, RecordedControl
from wandb.proto import wandb_internal_pb2

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    """No account, no files outside the test's folder, and a key that must not appear anywhere."""
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(sys, "argv", ["rlhf", "train", "--reward.token", "argv-secret"])
    yield
    wandb.teardown()


class TestConforms(ObserverContract):
    observer = WandbObserver
    configs = (WandbConfig(samples=0),)


def groups():
    row = Row({}, "gsm", 0)
    turns = [Turn([1], False, text="2+2?"), Turn([2], True, text="vier")]
    return [Group(row, 0, [Trajectory(row, turns, (0, 0), rewards={"math": RewardResult(1.0)}, reward=1.0)])]


def run(output, first, last, state=None, status="finished"):
    observer = WandbObserver(WandbConfig(project="p", samples_every=2))
    if state is not None:
        observer.load_state_dict(json.loads(json.dumps(state)))
    config = {"run": {"seed": 1}, "reward": [{"use": "http", "api_key": "config-secret"}]}
    observer.run_started(RunInfo("my run", Path(output), config, 4, first - 1, RecordedControl()))
    for step in range(first, last + 1):
        observer.rollouts_finished(step, groups())
        observer.step_finished(step, {"reward/mean": step / 4, "time/step": 0.5})
        observer.checkpoint_saved(step, Path(output) / "checkpoints")
    observer.run_ended(status)
    wandb.teardown()  # ends wandb's own process, which writes the last bytes
    return observer


def records(folder):
    """The records that `wandb sync` would upload: a LevelDB log of protocol buffers, after a header of 7 bytes."""
    (path,) = folder.glob("*.wandb")
    data, position, parts = path.read_bytes(), 7, []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # too short for a record's header: padding
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            parts = []
            yield record


def item_key(item):
    return item.key or "/".join(item.nested_key)


def history(folder):
    return [
        {item_key(item): json.loads(item.value_json) for item in record.history.item}
        for record in records(folder)
        if record.HasField("history")
    ]


def test_an_offline_run_holds_metrics_config_and_samples(tmp_path):
    run(tmp_path, 1, 3)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    lines = history(folder)
    assert [(line["step"], line["reward/mean"]) for line in lines] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert ["rollouts" in line or any("rollouts" in key for key in line) for line in lines] == [True, False, True]
    (first, _) = sorted((folder / "files" / "media" / "table").glob("rollouts_*.json"))
    table = json.loads(first.read_text())
    assert table["columns"][:3] == ["step", "group", "sample"]
    row = dict(zip(table["columns"], table["data"][0], strict=True))
    assert (row["step"], row["tokens"]) == (1, 1)
    assert (row["prompt"], row["completion"], row["reward"], row["rewards"]) == ("2+2?", "vier", 1.0, "math 1")
    uploaded = "".join(str(record) for record in records(folder))
    assert "my run" in uploaded
    assert "total_steps" in uploaded
    assert "checkpoint/step" in uploaded


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("failed", 1)])
def test_the_exit_code_says_whether_the_run_failed(tmp_path, status, code):
    run(tmp_path, 1, 1, status=status)
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert [record.exit.exit_code for record in records(folder) if record.HasField("exit")] == [code]


def test_no_secret_is_stored_or_printed(tmp_path, capfd):
    run(tmp_path, 1, 1)
    printed = "".join(capfd.readouterr())
    for secret in (KEY, "config-secret", "argv-secret"):
        assert secret not in printed
        holders = [p for p in tmp_path.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
        assert not holders, secret
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert "<hidden>" in "".join(str(record) for record in records(folder))


def test_a_resumed_run_is_the_same_run(tmp_path):
    state = run(tmp_path, 1, 2).state_dict()
    assert state["run_id"]
    assert run(tmp_path, 2, 3, state).state_dict() == state
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert {p.name for folder in folders for p in folder.glob("*.wandb")} == {f"run-{state['run_id']}.wandb"}
    steps = sorted(line["step"] for folder in folders for line in history(folder))
    assert steps == [1, 2, 2, 3]  # step 2 was repeated after the resume: the same point twice
    (tmp_path / "other").mkdir()
    assert run(tmp_path / "other", 1, 1).state_dict() != state


def test_the_key_is_not_an_option():
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        WandbConfig(api_key=KEY)


def test_online_without_a_key_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")
    observer = WandbObserver(WandbConfig(mode="online"))
    with pytest.raises(ConfigError, match=r"could not start: .*WANDB_API_KEY.*wandb login.*mode = \"offline\""):
        observer.run_started(RunInfo("r", tmp_path, {}, 1, 0, RecordedControl()))
    observer.run_ended("failed")  # it has not started
