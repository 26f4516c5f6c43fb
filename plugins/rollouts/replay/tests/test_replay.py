"""What is in a recording comes back as it was; what is not is refused with its whereabouts."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from rlhf.errors import ConfigError, RolloutError
from rlhf.types import Row
from rlhf_plugin_replay import Replay

PROMPT = {"ids": [1, 2], "sampled": False, "text": "ab", "versions": []}
ANSWER = {
    "ids": [3, 1],
    "sampled": True,
    "logprobs": [-0.5, -1.5],
    "versions": [[0, 4]],
    "finish": "stop",
    "text": "c\u2028",
}


def line(number, sample, index):
    row = {"source": "train", "index": index}
    made = {"group": number, "sample": sample, "index": [number, sample], "row": row, "turns": [PROMPT, ANSWER]}
    return json.dumps(made, ensure_ascii=False)  # as a run writes it: a text may hold a line end that is none of JSON's


def play(folder, number, sample, index=5, source="train"):
    rollout = Replay(Replay.Config(path=str(folder)))
    return asyncio.run(rollout.run(Row({}, source, index), 0, SimpleNamespace(index=(number, sample))))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "step-000001.jsonl").write_text(f"{line(0, 0, 5)}\n{line(0, 1, 5)}\n")
    (tmp_path / "step-000002.jsonl").write_text(f"{line(3, 0, 7)}\n")
    return tmp_path


def test_turns_come_back_as_they_were(folder):
    prompt, answer = play(folder, 0, 1)
    assert (prompt.ids, prompt.sampled) == ([1, 2], False)
    assert (answer.ids, answer.logprobs, answer.versions, answer.finish) == ([3, 1], [-0.5, -1.5], ((0, 4),), "stop")
    assert play(folder / "step-000002.jsonl", 3, 0, 7)


def test_what_is_not_recorded_is_refused(folder):
    with pytest.raises(RolloutError, match=r"no sample 0 of group 2; it holds 3 samples of groups 0 to 3"):
        play(folder, 2, 0)
    with pytest.raises(RolloutError, match=r"recorded for row 7 of 'train', but this run has row 5"):
        play(folder, 3, 0)


def test_damaged_and_missing_recordings_name_the_place(folder, tmp_path):
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        play(tmp_path / "nowhere", 0, 0)
    (folder / "step-000003.jsonl").write_text('{"sample": 0}\n')
    with pytest.raises(ConfigError, match=r"step-000003.jsonl:1 is not a recorded sample"):
        play(folder, 0, 0)
    (folder / "step-000003.jsonl").unlink()
    for file in folder.glob("*.jsonl"):
        file.write_text("")
    with pytest.raises(ConfigError, match="holds no samples"):
        play(folder, 0, 0)
