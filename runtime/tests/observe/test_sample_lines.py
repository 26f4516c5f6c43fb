"""Samples that are printed while training."""

import io

import pytest
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_runtime.observe.progress import Progress
from rlhf_runtime.observe.sample_lines import LONG, best_and_worst, printable, shortened


def group(number, *rewards):
    row = Row({"prompt": "1+1="}, "sums", number)
    trajectories = []
    for sample, reward in enumerate(rewards):
        turns = [Turn([1], False, text="1+1="), Turn([2, 3], True, text=f"answer {sample}\nof \x1b[2J {number}")]
        rewarded = {} if reward is None else {"math": RewardResult(reward)}
        trajectories.append(Trajectory(row, turns, (number, sample), rewards=rewarded, reward=reward))
    return Group(row, number, trajectories)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([group(0, 0.5, 1.0), group(1, 0.0, 0.7)], [("best", (0, 1)), ("worst", (1, 0))]),
        ([group(0, None, 0.5), group(1, None)], [("best", (0, 1))]),
        ([group(0, None, None), group(1, None)], [("sample", (0, 0)), ("sample", (1, 0))]),
        ([group(0)], []),
    ],
)
def test_the_best_and_the_worst_are_chosen(groups, expected):
    assert [(title, (s.group, s.sample)) for title, s in best_and_worst(groups)] == expected


def test_samples_are_printed_without_control_characters():
    out = io.StringIO()
    Progress(9, stream=out).samples(4, [group(0, 0.5, 1.0)])
    assert out.getvalue() == (
        "step 4, best: reward 1 (math 1), 2 tokens, ok\n"
        "  prompt: 1+1=\n"
        "  completion: answer 1\n    of \\x1b[2J 0\n"
        "step 4, worst: reward 0.5 (math 0.5), 2 tokens, ok\n"
        "  prompt: 1+1=\n"
        "  completion: answer 0\n    of \\x1b[2J 0\n"
    )


def test_a_quiet_run_prints_none(capsys):
    Progress(9, show="quiet").samples(4, [group(0, 0.5)])
    assert capsys.readouterr() == ("", "")


def test_long_texts_are_shortened():
    text = "a" * 300 + "b" * 700
    assert shortened(text) == "a" * 200 + f" ... {1000 - LONG} characters ... " + "b" * 200
    assert shortened(text, None) == text
    assert shortened("a" * LONG) == "a" * LONG
    assert printable("é\t\n\x07\u202e\ud800") == "é\t\n\\x07\\u202e\\ud800"
