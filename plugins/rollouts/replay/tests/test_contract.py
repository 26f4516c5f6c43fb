"""The conformance suite of rollouts, on one recorded sample."""

import json

import pytest
from rlhf_plugin_replay import ReplayRollout
from rlhf_testing import fabricate
from rlhf_testing.rollout import RolloutContract

PROMPT = {"ids": [1, 2], "sampled": False, "logprobs": None, "versions": [], "text": "ab"}
ANSWER = {"ids": [3, 1], "sampled": True, "logprobs": [-0.5, -1.5], "versions": [[0, 4]], "finish": "stop", "text": "c"}


def line(number: int = 0, sample: int = 0, index: int = 0) -> str:
    row = {"source": fabricate.row({}).source, "index": index}
    return json.dumps(
        {"group": number, "sample": sample, "index": [number, sample], "row": row, "turns": [PROMPT, ANSWER]}
    )


class TestReplay(RolloutContract):
    rollout = ReplayRollout

    @pytest.fixture(autouse=True)
    def recording(self, tmp_path):
        path = tmp_path / "samples.jsonl"
        path.write_text(line(index=fabricate.row({}).index) + "\n")
        type(self).configs = (ReplayRollout.Config(path=str(path)),)
