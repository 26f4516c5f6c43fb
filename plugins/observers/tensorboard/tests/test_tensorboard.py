"""Real event files, read back with TensorBoard's own reader."""

from dataclasses import replace

from rlhf.interfaces import RunInfo
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_plugin_tensorboard.observer import TensorBoardConfig, TensorBoardObserver
from rlhf_testing.observer import ObserverContract, RecordedControl
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class TestConforms(ObserverContract):
    observer = TensorBoardObserver
    configs = (TensorBoardConfig(samples=0),)


def groups():
    row = Row({}, "gsm", 0)
    turns = [Turn([1], False, text="2+2?\n<script>"), Turn([2], True, text="vier | 4")]
    return [Group(row, 0, [Trajectory(row, turns, (0, 0), rewards={"math": RewardResult(1.0)}, reward=1.0)])]


def of_agents():
    row, turns = Row({}, "game", 0), [Turn([1], False, text="your move"), Turn([2], True, text="e4")]
    agents = [[replace(turn, agent=agent) for turn in turns] for agent in ("white", "black")]
    return [Group(row, 0, [Trajectory(row, turns, (0, 0), reward=1.0) for turns in agents])]


def start(output, first_step=0, config=None, total=9):
    observer = TensorBoardObserver(TensorBoardConfig(samples_every=2))
    observer.run_started(RunInfo("run", output, config or {"run": {"seed": 1}}, total, first_step, RecordedControl()))
    return observer


def log(observer, steps, shift=0.0):
    for step in steps:
        if step:
            observer.rollouts_finished(step, groups())
        observer.step_finished(step, {"reward/mean": step / 4 + shift})


def read(output):
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    return events


def scalars(output, tag="reward/mean"):
    return [(event.step, event.value) for event in read(output).Scalars(tag)]


def texts(events, tag):
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)]


def test_scalars_samples_and_config_are_read_back(tmp_path):
    observer = start(tmp_path, config={"reward": {"api_key": "secret", "weight": 0.5}})
    log(observer, [1, 2, 3])
    assert len(scalars(tmp_path)) == 3  # on disk before the run ends
    observer.run_ended("finished")
    events = read(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    tables = texts(events, "rollouts")
    assert [step for step, _ in tables] == [1, 3]
    assert "| 1.0 | 2+2? ⏎ &lt;script&gt; | vier \\| 4 | math 1 | ok | 1 |" in tables[0][1]
    assert events.summary_metadata["rollouts"].plugin_data.plugin_name == "text"
    ((_, config),) = texts(events, "config")
    assert '"weight": 0.5' in config
    assert "secret" not in config


def test_samples_of_several_agents_are_told_apart(tmp_path):
    observer = start(tmp_path)
    observer.rollouts_finished(1, of_agents())
    observer.run_ended("finished")
    ((_, table),) = texts(read(tmp_path), "rollouts")
    assert table.splitlines()[2:] == [f"| 1.0 | your move | e4 |  | ok | 1 | {name} |" for name in ("white", "black")]


def test_steps_that_a_resume_repeats_are_not_shown_twice(tmp_path):
    killed = start(tmp_path)
    log(killed, [1, 2, 3, 4])  # not closed: killed after step 4; its last checkpoint is of step 2
    resumed = start(tmp_path, first_step=2)
    log(resumed, [3, 4, 5], shift=10.0)
    resumed.run_ended("finished")
    assert scalars(tmp_path) == [(1, 0.25), (2, 0.5), (3, 10.75), (4, 11.0), (5, 11.25)]
    killed.run_ended("failed")


def test_a_run_that_starts_again_is_shown_once(tmp_path):
    killed = start(tmp_path)
    log(killed, [0, 1])  # killed before its first checkpoint
    second = start(tmp_path)
    log(second, [0, 1, 2], shift=10.0)
    second.run_ended("finished")
    assert scalars(tmp_path) == [(0, 10.0), (1, 10.25), (2, 10.5)]
    killed.run_ended("failed")


def test_samples_can_be_turned_off(tmp_path):
    observer = TensorBoardObserver(TensorBoardConfig(samples=0, folder="tensorboard"))
    observer.run_started(RunInfo("run", tmp_path, {}, 1, 0, RecordedControl()))
    log(observer, [1])
    observer.run_ended("finished")
    assert "rollouts" not in read(tmp_path).Tags()["tensors"]


def test_run_ended_without_run_started_does_nothing():
    TensorBoardObserver().run_ended("failed")
