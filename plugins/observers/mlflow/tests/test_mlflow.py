"""Real runs in a folder, written by MLflow's own client and read back with it."""

import json

import pytest
from pydantic import ValidationError
from rlhf.errors import ConfigError
from rlhf.interfaces import RunInfo
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_plugin_mlflow.observer import MLflowConfig, MLflowObserver
from rlhf_testing.observer import ObserverContract, RecordedControl


@pytest.fixture(autouse=True)
def private(monkeypatch):
    """Ignores a server of this machine, and removes the variable that the observer sets."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


class TestConforms(ObserverContract):
    observer = MLflowObserver
    configs = (MLflowConfig(samples=0),)


LOSSES = {"policy/loss": 0.75, "policy/loss/kl": 0.25, "policy/loss/kl/b": 0.125, "turns": 2.0, "turns/longest": 4.0}


def groups():
    row = Row({}, "gsm", 0)
    turns = [Turn([1], False, text="2+2?"), Turn([2], True, text="vier ✓")]
    return [Group(row, 0, [Trajectory(row, turns, (0, 0), rewards={"math": RewardResult(1.0)}, reward=1.0)])]


def run(output, first, last, state=None, end="finished", **config):
    observer = MLflowObserver(MLflowConfig(experiment="e", samples_every=2, tags={"team": "a"}, **config))
    if state is not None:
        observer.load_state_dict(json.loads(json.dumps(state)))
    settings = {"run": {"seed": 1, "name": None}, "reward": [{"use": "http", "api_key": "config-secret"}]}
    observer.run_started(RunInfo("my run", output, settings, 4, first - 1, RecordedControl()))
    for step in range(first, last + 1):
        observer.rollouts_finished(step, groups())
        observer.step_finished(step, {"reward/mean": step / 4, "eval/pass@1": 0.5} | LOSSES)
        observer.checkpoint_saved(step, output / "checkpoints")
    observer.run_ended(end)
    return observer


def client_of(folder):
    from mlflow.tracking import MlflowClient  # takes seconds, for which a collection of tests need not wait

    return MlflowClient(folder.as_uri())


def history(client, run_id, name="reward/mean"):
    return [(m.step, m.value) for m in client.get_metric_history(run_id, name)]


def test_a_metric_that_comes_later_may_have_the_name_of_a_folder_or_a_file(tmp_path):
    lines = [{"a/b": 1.0, "c": 2.0}, {"a": 3.0, "c/d": 4.0}, {"a": 5.0, "a/b": 6.0, "c": 7.0, "c/d": 8.0}]
    state: dict[str, str] = {}
    for step, line in enumerate(lines, 1):  # each after a resume
        observer = MLflowObserver()
        observer.load_state_dict(state)
        observer.run_started(RunInfo("my run", tmp_path, {}, 3, step - 1, RecordedControl()))
        observer.step_finished(step, line)
        state = observer.state_dict()
        observer.run_ended("stopped")
    client, run_id = client_of(tmp_path / "mlruns"), state["run_id"]
    assert history(client, run_id, "a/b") == [(1, 1.0), (3, 6.0)]
    assert history(client, run_id, "a.value") == [(2, 3.0), (3, 5.0)]
    assert history(client, run_id, "c") == [(1, 2.0), (3, 7.0)]
    assert history(client, run_id, "c.d") == [(2, 4.0), (3, 8.0)]


def test_metrics_parameters_and_samples_are_read_back(tmp_path):
    run_id = run(tmp_path, 1, 3).state_dict()["run_id"]
    client = client_of(tmp_path / "mlruns")
    assert history(client, run_id) == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert history(client, run_id, "eval/pass_at_1") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert history(client, run_id, "policy/loss") == [(1, 0.75), (2, 0.75), (3, 0.75)]
    assert history(client, run_id, "policy/loss.kl") == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert history(client, run_id, "policy/loss.kl.b") == [(1, 0.125), (2, 0.125), (3, 0.125)]
    assert history(client, run_id, "turns.longest") == [(1, 4.0), (2, 4.0), (3, 4.0)]
    record = client.get_run(run_id)
    assert (record.info.run_name, record.info.status) == ("my run", "FINISHED")
    assert client.get_experiment(record.info.experiment_id).name == "e"
    assert record.data.params == {
        "run.seed": "1",
        "reward.0.use": "http",
        "reward.0.api_key": "<hidden>",
        "total_steps": "4",
    }
    assert (record.data.tags["team"], record.data.tags["checkpoint/step"]) == ("a", "3")
    (artifacts,) = tmp_path.glob("mlruns/*/*/artifacts")
    assert sorted(p.name for p in (artifacts / "rollouts").iterdir()) == ["step-000001.json", "step-000003.json"]
    [sample] = json.loads((artifacts / "rollouts/step-000001.json").read_text())
    assert (sample["prompt"], sample["completion"], sample["rewards"]) == ("2+2?", "vier ✓", "math 1")
    assert json.loads((artifacts / "config.json").read_text())["run"]["seed"] == 1
    holders = [p for p in tmp_path.rglob("*") if p.is_file() and b"config-secret" in p.read_bytes()]
    assert not holders


def test_a_resumed_run_is_the_same_run(tmp_path):
    state = run(tmp_path, 1, 2, end="stopped").state_dict()
    client = client_of(tmp_path / "mlruns")
    assert client.get_run(state["run_id"]).info.status == "KILLED"
    assert run(tmp_path, 2, 3, state, end="failed").state_dict() == state
    assert history(client, state["run_id"]) == [(1, 0.25), (2, 0.5), (2, 0.5), (3, 0.75)]
    assert client.get_run(state["run_id"]).info.status == "FAILED"
    assert run(tmp_path, 1, 1).state_dict() != state


def test_the_place_is_the_option_then_the_environment_then_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "by-environment"))
    run(tmp_path, 1, 1)
    run(tmp_path, 1, 1, tracking_uri=(tmp_path / "by-option").as_uri())
    assert (tmp_path / "by-environment").is_dir()
    assert (tmp_path / "by-option").is_dir()
    assert not (tmp_path / "mlruns").exists()


def test_an_invalid_tracking_uri_is_refused(tmp_path):
    observer = MLflowObserver(MLflowConfig(tracking_uri="ftp://nowhere/store"))
    with pytest.raises(ConfigError, match=r"could not start at ftp://nowhere/store: .*tracking_uri = \"...\""):
        observer.run_started(RunInfo("r", tmp_path, {}, 1, 0, RecordedControl()))
    observer.run_ended("failed")  # it has not started


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="tracking_uri"):
        MLflowObserver(MLflowConfig(tracking_uri=str(tmp_path / "file" / "runs"))).check(tmp_path)
    MLflowObserver(MLflowConfig(tracking_uri=str(tmp_path / "runs"))).check(tmp_path)


def test_a_tracking_uri_with_a_password_is_refused():
    with pytest.raises(ValidationError, match="MLFLOW_TRACKING_PASSWORD in the environment"):
        MLflowConfig(tracking_uri="https://me:secret@host:5000")


def test_it_sends_no_statistics(tmp_path, monkeypatch):
    from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY

    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    run(tmp_path, 1, 1)
    assert MLFLOW_DISABLE_TELEMETRY.get()
