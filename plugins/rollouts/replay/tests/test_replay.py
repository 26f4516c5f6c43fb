"""Recorded samples are returned unchanged. Missing samples and damaged recordings are refused, naming their place."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace

import pytest
from rlhf.errors import ConfigError, RolloutError
from rlhf.types import Group, Image, Row, Trajectory, Turn
from rlhf_plugin_replay import ReplayRollout
from rlhf_runtime.checkpoint.saved_groups import write_groups, write_lines

ANSWER = {"ids": [3, 1], "sampled": True, "logprobs": [-0.5, -1.5], "versions": ((0, 4),), "finish": "stop"}

IMAGE = Image(b"\x89PNG", 0, 1, [7])


def group(number, samples, index):
    row = Row({}, "train", index)
    turns = [Turn([1, 2], False, text="ab", images=(IMAGE,)), Turn(**ANSWER, text="c\u2028")]
    return Group(row, number, [Trajectory(row, turns, (number, sample)) for sample in range(samples)])


def play(folder, number, sample, index=5, source="train"):
    rollout = ReplayRollout(ReplayRollout.Config(path=str(folder)))
    return asyncio.run(rollout.run(Row({}, source, index), 0, SimpleNamespace(index=(number, sample))))


@pytest.fixture
def folder(tmp_path):
    write_groups(tmp_path / "step-000001.arrow", [group(0, 2, 5), Group(Row({}, "train", 6), 1, [])])
    write_groups(tmp_path / "step-000002.arrow", [group(3, 1, 7)])
    return tmp_path


def test_recorded_turns_are_returned_unchanged(folder):
    prompt, answer = play(folder, 0, 1)
    assert prompt == Turn([1, 2], sampled=False, text="ab", images=(IMAGE,))
    assert (answer.ids, answer.logprobs) == (array("i", [3, 1]), array("f", [-0.5, -1.5]))
    assert (answer.versions, answer.finish) == (((0, 4),), "stop")
    assert play(folder / "step-000002.arrow", 3, 0, 7)


def test_samples_that_were_not_recorded_are_refused(folder):
    with pytest.raises(RolloutError, match=r"no sample 0 of group 2; it holds 3 samples of groups 0 to 3"):
        play(folder, 2, 0)
    with pytest.raises(RolloutError, match=r"recorded for row 7 of 'train', but this run has row 5"):
        play(folder, 3, 0)


def test_damaged_and_missing_recordings_name_the_place(folder, tmp_path):
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        play(tmp_path / "nowhere", 0, 0)
    content = (folder / "step-000002.arrow").read_bytes()
    (folder / "step-000003.arrow").write_bytes(content[:-200])
    with pytest.raises(ConfigError, match=r"step-000003.arrow is not a recorded sample"):
        play(folder, 0, 0)
    (folder / "step-000003.arrow").unlink()
    lines = folder / "samples.jsonl"
    lines.write_text('{"sample": 0}\n')
    with pytest.raises(ConfigError, match=r"samples.jsonl:1 is not a recorded sample"):
        play(lines, 0, 0)
    for file in folder.glob("*.arrow"):
        write_groups(file, [])
    with pytest.raises(ConfigError, match="holds no samples"):
        play(folder, 0, 0)


def test_a_file_of_json_lines_is_a_recording_too(tmp_path):
    write_lines(tmp_path / "samples.jsonl", [group(0, 2, 5)])
    recording = tmp_path / "step-000001.arrow"
    write_groups(recording, [group(0, 2, 5)])
    assert play(tmp_path / "samples.jsonl", 0, 1) == play(recording, 0, 1)


def test_a_text_with_half_a_character_is_replayed(tmp_path):
    broken = group(0, 1, 5)
    broken.trajectories[0].turns[1].text = "\ud83d"
    write_groups(tmp_path / "step-000001.arrow", [broken])
    assert play(tmp_path, 0, 0) == broken.trajectories[0].turns
