import dataclasses
import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf.errors import CheckpointError
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_runtime.checkpoint.saved_groups import group_lines, groups_from_lines, read_groups, write_groups

ROWS = {("gsm", n): Row({"prompt": f"p{n}", "answer": n}, "gsm", n) for n in range(5)}


def find(source, index):
    return ROWS[source, index]


def group(number=3, samples=2, logprob=-0.1, info=None):
    row = ROWS["gsm", 1]
    trajectories = [
        Trajectory(
            row=row,
            turns=[
                Turn([1, 2, 3], False, text="Q: 1+1?\u2028\n"),
                Turn([4, 5], True, [logprob, -1e-300], ((0, 7), (1, 8)), "stop", 0.7, 0.5, "zwei é"),
                Turn([6], False, text="again", fresh=True),
                Turn([9], True, [-2.5], ((0, 8),), "length", 1.0, None, "x"),
            ],
            index=(number, sample),
            status="truncated",
            rewards={
                "math": RewardResult(1.0, 0.5, ((1, 0, 0.25), (1, 1, 0.1)), info or {"extracted": "2", "ok": True}),
                "none": RewardResult(None),
            },
            reward=0.1 + 0.2,
            score=1 / 3,
        )
        for sample in range(samples)
    ]
    return Group(row, number, trajectories)


def test_groups_come_back_equal_with_their_rows(tmp_path):
    groups = [group(3), group(4, samples=1), Group(ROWS["gsm", 2], 5, [])]
    path = tmp_path / "ready.jsonl"
    write_groups(path, groups)
    back = read_groups(path, find)
    assert back == groups
    assert all(t.row is g.row is ROWS["gsm", 1] for g in back[:2] for t in g.trajectories)
    assert type(back[0].trajectories[0].index) is tuple
    assert type(back[0].trajectories[0].turns[1].versions[0]) is tuple


@given(st.floats())
def test_log_probs_come_back_bit_for_bit(x):
    (back,) = groups_from_lines(group_lines([group(logprob=x, samples=1)]), find)
    value = back.trajectories[0].turns[1].logprobs[0]
    assert struct.pack("<d", value) == struct.pack("<d", x) or (math.isnan(x) and math.isnan(value))


def test_every_field_is_written():
    """A field added to a type is saved, or this fails."""
    line = json.loads(next(iter(group_lines([group()]))))
    assert {f.name for f in dataclasses.fields(Trajectory)} <= set(line)
    assert {f.name for f in dataclasses.fields(Turn)} == set(line["turns"][0])
    assert {f.name for f in dataclasses.fields(RewardResult)} == set(line["rewards"]["math"])
    assert line["row"] == {"source": "gsm", "index": 1}


def test_a_line_reads_well():
    text = next(iter(group_lines([group()])))
    assert '"text": "zwei é"' in text
    assert "\n" not in text


def test_info_that_is_not_json_names_the_reward():
    with pytest.raises(CheckpointError, match=r"sample \(3, 0\): info of reward 'math'\.x is a object"):
        list(group_lines([group(info={"x": object()})]))
    (back,) = groups_from_lines(group_lines([group(samples=1, info={"x": math.inf})]), find)
    assert back.trajectories[0].rewards["math"].info == {"x": math.inf}


def test_half_characters_survive(tmp_path):
    broken = group(samples=1)
    broken.trajectories[0].turns[1].text = "\ud83d"
    write_groups(tmp_path / "r", [broken])
    assert read_groups(tmp_path / "r", find) == [broken]


def test_a_foreign_row_in_a_group_is_refused():
    wrong = group()
    wrong.trajectories[1] = dataclasses.replace(wrong.trajectories[1], row=ROWS["gsm", 4])
    with pytest.raises(CheckpointError, match="sample 1 is of another row"):
        list(group_lines([wrong]))


def test_damaged_files_name_the_line(tmp_path):
    path = tmp_path / "ready.jsonl"
    lines = list(group_lines([group(3, 3)]))
    with pytest.raises(CheckpointError, match=r"ready:2 is sample 2 of group 3; expected sample 1 .*line is missing"):
        groups_from_lines([lines[0], lines[2]], find, "ready")
    with pytest.raises(CheckpointError, match=r"ready:1 is not a sample: KeyError"):
        groups_from_lines(["{}"], find, "ready")
    with pytest.raises(CheckpointError, match=r"ready:1 is not a sample: IndexError"):
        groups_from_lines([lines[1]], find, "ready")
    path.write_text(lines[0][:50])
    with pytest.raises(CheckpointError, match="ends in the middle of a line"):
        read_groups(path, find)
    path.write_text(lines[0][:50] + "\n")
    with pytest.raises(CheckpointError, match=r"ready\.jsonl:1 is not valid JSON"):
        read_groups(path, find)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_groups(tmp_path / "missing", find)
