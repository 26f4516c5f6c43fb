"""Environments of the real package. Everything that they asked for is trained on with the log-probs of the trainer,
which the laboratory compares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.full


def ok(samples):
    assert [t.error for t in samples] == [""] * len(samples)
    return samples


def test_a_conversation_is_one_sequence_with_the_rubrics_reward(lab):
    [sample] = ok(lab.played({}, [2]))
    [text] = lab.text(sample)
    assert text.count("Go on.") == 2
    assert "Add." in text
    assert "2+1=" in text
    assert [t.sampled for t in sample.turns] == [False, True] * 3
    right = float(any("It is 3." in t.text for t in sample.turns if t.sampled))
    assert sample.turns[-1].reward == sample.reward == right + 0.25 * sample.info["env/length"]
    assert sample.info["env/length"] == 5.0
    assert sample.info["env/right"] == right
    assert sample.info["env/num_turns"] == 3.0


def test_tools_are_offered_called_and_counted(lab):
    samples = ok(lab.played({"kind": "tools"}, range(4), samples=3))
    texts = [lab.text(t) for t in samples]
    assert all(len(sequences) == 1 for sequences in texts)
    assert any("<tool_response>\n3\n</tool_response>" in text for [text] in texts)
    for sample in samples:
        assert sample.info["env/add_calls"] == sample.info["rollout/calls/add"]


def test_samples_share_a_process_and_examples_are_those_of_their_split(lab, tmp_path):
    log = tmp_path / "loaded"
    os.environ["JUDGE_KEY"] = "k"
    rows = [{"prompt": "", "index": 1, "split": "eval"}, {"prompt": "2+1=", "index": 2}, {"prompt": "", "index": 3}]
    options = {"environment": ("JUDGE_KEY",), "concurrency": 4}
    samples = ok(lab.played({"kind": "single", "where": str(log)}, rows, options, samples=3))
    del os.environ["JUDGE_KEY"]
    [entry] = map(json.loads, log.read_text().splitlines())
    assert entry["key"] == "k"
    questions = [question for t in samples for question in ("5+1=", "2+1=", "3+1=") if question in lab.text(t)[0]]
    assert questions == ["5+1="] * 3 + ["2+1="] * 3 + ["3+1="] * 3
    assert len({t.turns[-1].text for t in samples}) > 1


def test_several_processes_share_the_samples(lab, tmp_path):
    log = tmp_path / "loaded"
    ok(lab.played({"kind": "single", "where": str(log)}, range(4), {"processes": 2}))
    assert len(log.read_text().splitlines()) == 2


def test_a_conversation_that_becomes_too_long_is_truncated_and_an_empty_answer_ends_it(lab):
    samples = ok(lab.played({"max_turns": 50}, range(4), samples=3, max_tokens=300))
    assert all(t.turns[-1].reward is not None for t in samples)
    long = [t for t in samples if t.status == "truncated"]
    assert long
    assert {t.turns[-1].finish for t in long} == {"length"}
    assert min(sum(len(turn.ids) for turn in t.turns) for t in long) > 230
    endings = [t.turns[-1].text for t in samples if t.status == "ok"]
    assert endings == [""] * len(endings)
    assert endings


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"fails": "breaks"}, "the reward function 'breaks' failed: ConnectionError: the judge is gone"),
        ({"fails": "breaks_later"}, "the reward function 'breaks_later' failed: ConnectionError: the judge is gone l"),
        ({"kind": "broken"}, "SandboxError('no sandbox')"),
        ({"timeout_seconds": 0.001}, "its own time limit (timeout_seconds) has passed"),
        ({"fails": "compares"}, "compares the samples of a group"),
        ({"fails": "reward"}, "a reward function is named 'reward'"),
        ({"fails": "exits"}, "the process of the environment 'adding' ended with exit code 3. The end of its output:"),
        ({"kind": "missing key"}, "(KeyError: 'JUDGE_KEY')"),
    ],
)
def test_a_failure_is_a_failed_sample_with_its_cause_and_never_a_reward(lab, args, error):
    [sample] = lab.played(args)
    assert sample.status == "failed"
    assert error in sample.error


def test_a_row_that_names_no_example(lab):
    rows = [{"index": 4}, {"index": "1"}, {"index": 0, "split": "test"}, {"index": 0, "prompt": "7+1="}, {"index": 0}]
    *failed, good = lab.played({}, [{"prompt": "", **row} for row in rows])
    assert [t.status for t in failed] == ["failed"] * 4
    assert "index is 4, but the split 'train' has 4 examples" in failed[0].error
    assert "the row's column index is '1'" in failed[1].error
    assert "the row's column split is 'test'" in failed[2].error
    assert "example 0 of 'train' has a different prompt from the row's" in failed[3].error
    assert good.error == ""


@pytest.mark.parametrize("fails", ["waits", "hangs"])
def test_a_reward_that_hangs_is_ended_at_the_deadline_and_the_next_sample_is_played(lab, fails, tmp_path):
    log = tmp_path / "loaded"
    rollout = lab.rollout(args={"kind": "single", "fails": fails, "where": str(log)})
    lab.main.run(rollout._processes[0]._running())
    [[sample]] = [g.trajectories for g in lab.groups(rollout, [{"prompt": "", "index": 0}], deadline=8.0)]
    assert "took over stream.rollout_deadline" in sample.error
    deadline = time.monotonic() + 20
    while fails == "hangs" and rollout._processes[0]._started is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (rollout._processes[0]._started is None) == (fails == "hangs"), "only a blocked process is killed"
    assert rollout._processes[0].samples == 0


def test_the_command_writes_rows(lab):
    words = [sys.executable, "-m", "rlhf_plugin_verifiers", "adding", "--python", lab.python, "--split", "eval"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows == [{"prompt": f"{4 + n}+1=", "index": n, "split": "eval"} for n in range(2)]
    done = subprocess.run([*words, "--first", "1", "--rows", "5"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "index is 2, but the split 'eval' has 2 examples" in done.stderr
