import dataclasses
import json
import math
import struct
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather
from rlhf.errors import CheckpointError
from rlhf.types import ExpertRecord, Group, Image, RewardResult, Row, Trajectory, Turn
from rlhf_runtime.checkpoint import sample_table
from rlhf_runtime.checkpoint.saved_groups import group_lines, read_groups, recorded, write_groups, write_lines

EXPERTS = ExpertRecord(bytes([3, 0, 1, 255] * 3), layers=2, experts=256, chosen=2)
ROWS = {("gsm", n): Row({"prompt": f"p{n}", "answer": n}, "gsm", n) for n in range(5)}


def find(source, index):
    return ROWS[source, index]


def group(number=3, samples=2, logprob=-0.1, info=None):
    row = ROWS["gsm", 1]
    trajectories = [
        Trajectory(
            row=row,
            turns=[
                Turn([1, 2, 3], False, text="Q: 1+1?\u2028\n", images=(Image(b"\x89\xff", 1, 2, [7]),)),
                Turn([4, 5], True, [logprob, -1e-30], ((0, 7), (1, 8)), "stop", 0.7, 0.5, "zwei é", experts=EXPERTS),
                Turn([6], False, text="again", fresh=True, messages=(("tool", "é\n2"), ("user", "again"))),
                Turn([9], True, [-2.5], ((0, 8),), "length", 1.0, None, "x", score=0.25, agent="first"),
            ],
            index=(number, sample),
            status="truncated",
            rewards={
                "math": RewardResult(1.0, 0.5, ((1, 0, 0.25), (1, 1, 0.1)), info or {"extracted": "2", "ok": True}),
                "none": RewardResult(None),
            },
            reward=0.1 + 0.2,
            score=1 / 3,
            info={"env/steps": 3.0, "rollout/calls/add": 0.1},
        )
        for sample in range(samples)
    ]
    return Group(row, number, trajectories)


def test_groups_come_back_equal_with_their_rows(tmp_path):
    groups = [group(3), group(4, samples=1), Group(ROWS["gsm", 2], 5, [])]
    path = tmp_path / "ready.arrow"
    write_groups(path, groups)
    copy = read_groups(path, find)
    assert copy == groups
    assert all(t.row is g.row is ROWS["gsm", 1] for g in copy[:2] for t in g.trajectories)
    assert type(copy[0].trajectories[0].index) is tuple
    assert type(copy[0].trajectories[0].turns[1].versions[0]) is tuple


def test_no_groups_and_samples_without_turns_come_back(tmp_path):
    path = tmp_path / "ready.arrow"
    write_groups(path, [])
    assert read_groups(path, find) == []
    failed = group(samples=1)
    failed.trajectories[0].turns, failed.trajectories[0].status = [], "failed"
    failed.trajectories[0].rewards, failed.trajectories[0].error = {}, "EnvError: it broke"
    write_groups(path, [failed])
    assert read_groups(path, find) == [failed]


@pytest.mark.parametrize("limit", ["AT_ONCE", "IMAGES_AT_ONCE"])
def test_many_batches_of_rows_come_back(tmp_path, monkeypatch, limit):
    """Files with many tokens or large images have many batches, because a column of a batch holds at most 2 GiB."""
    monkeypatch.setattr(sample_table, limit, 10)
    groups = [group(number, samples=number % 3) for number in range(20)]
    write_groups(tmp_path / "ready.arrow", groups)
    assert pa.ipc.open_file(pa.OSFile(str(tmp_path / "ready.arrow"))).num_record_batches > 5
    assert read_groups(tmp_path / "ready.arrow", find) == groups


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(width=32), min_size=2, max_size=2), st.floats())
def test_log_probs_and_rewards_come_back_bit_for_bit(logprobs, reward):
    original = group(samples=1)
    original.trajectories[0].turns[1].logprobs = logprobs
    original.trajectories[0].reward = reward
    with tempfile.TemporaryDirectory() as folder:
        write_groups(Path(folder, "r"), [original])
        (copy,) = read_groups(Path(folder, "r"), find)
    new, old = copy.trajectories[0], original.trajectories[0]
    assert new.turns[1].logprobs.tobytes() == old.turns[1].logprobs.tobytes()
    assert struct.pack("<d", new.reward) == struct.pack("<d", reward)


def test_every_field_is_written():
    """A field added to a type is saved, or this fails."""
    line = json.loads(next(iter(group_lines([group()]))))
    assert {f.name for f in dataclasses.fields(Trajectory)} <= set(line)
    assert {f.name for f in dataclasses.fields(Turn)} == set(line["turns"][0])
    assert {f.name for f in dataclasses.fields(RewardResult)} == set(line["rewards"]["math"])
    assert line["row"] == {"source": "gsm", "index": 1}
    assert set(line) - {"row"} <= set(sample_table.SCHEMA.names)
    assert set(line["turns"][0]) == {f.name for f in sample_table.TURN}
    assert set(line["rewards"]["math"]) == {f.name for f in sample_table.REWARD} - {"name"}


def test_a_line_reads_well():
    text = next(iter(group_lines([group()])))
    assert '"text": "zwei é"' in text
    assert "\n" not in text


def test_tables_of_others_read_the_file(tmp_path):
    import datasets  # large packages, which collect no test here
    import pandas

    write_groups(tmp_path / "step-000001.arrow", [group()], prompt=lambda t: "asked")
    frame = pandas.read_feather(tmp_path / "step-000001.arrow")
    assert frame["prompt"].tolist() == ["asked", "asked"]
    turn = frame["turns"][1][1]
    assert (turn["ids"].tolist(), turn["ids"].dtype, turn["logprobs"].dtype) == ([4, 5], "int32", "float32")
    rows = datasets.Dataset.from_list(feather.read_table(tmp_path / "step-000001.arrow").to_pylist())
    assert rows[0]["turns"][1]["ids"] == [4, 5]


def test_info_that_is_not_json_names_the_reward(tmp_path):
    with pytest.raises(CheckpointError, match=r"sample \(3, 0\): info of reward 'math'\.x is a object"):
        write_groups(tmp_path / "r", [group(info={"x": object()})])
    assert list(tmp_path.iterdir()) == []
    write_groups(tmp_path / "r", [group(samples=1, info={"x": math.inf})])
    assert read_groups(tmp_path / "r", find)[0].trajectories[0].rewards["math"].info == {"x": math.inf}


def test_half_characters_survive(tmp_path):
    broken = group(samples=2)
    broken.trajectories[0].turns[1].text = "\ud83d"
    broken.trajectories[0].turns[1].logprobs = [math.nan, -math.inf]
    write_groups(tmp_path / "r", [broken])
    (copy,) = read_groups(tmp_path / "r", find)
    assert copy.trajectories[1] == broken.trajectories[1]
    new, old = (g.trajectories[0].turns[1] for g in (copy, broken))
    assert (new.text, new.ids, new.logprobs.tobytes()) == (old.text, old.ids, old.logprobs.tobytes())


@pytest.mark.parametrize("name", ["samples.arrow", "samples.jsonl"])
def test_info_with_infinity_is_written_with_half_characters_and_infinite_log_probs(tmp_path, name):
    sampled = group(samples=1, logprob=-math.inf, info={"x": math.inf, "n": [1]})
    sampled.trajectories[0].turns[1].text = "\ud83d"
    (write_groups if name.endswith("arrow") else write_lines)(tmp_path / name, [sampled])
    ((_, sample),) = recorded(tmp_path / name)
    assert sample["rewards"]["math"]["info"] == {"x": math.inf, "n": [1]}
    assert sample["turns"][1]["text"] == "\ud83d"
    assert sample["turns"][1]["logprobs"][0] == -math.inf


def test_a_foreign_row_in_a_group_is_refused(tmp_path):
    wrong = group()
    wrong.trajectories[1] = dataclasses.replace(wrong.trajectories[1], row=ROWS["gsm", 4])
    with pytest.raises(CheckpointError, match="sample 1 belongs to a different row"):
        write_groups(tmp_path / "r", [wrong])


@pytest.fixture
def saved(tmp_path):
    """(path, its table)."""
    path = tmp_path / "ready.arrow"
    write_groups(path, [group(3, 3)])
    return path, feather.read_table(path, memory_map=False)


def rewritten(path, table):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("cut", [1, 500, -1])
def test_a_file_that_was_cut_is_refused(saved, cut):
    path, _ = saved
    path.write_bytes(path.read_bytes()[: -cut if cut > 0 else 5])
    with pytest.raises(CheckpointError, match=r"^cannot read .*ready\.arrow: "):
        read_groups(path, find)


def test_a_file_that_is_missing_or_of_another_kind_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*missing"):
        read_groups(tmp_path / "missing", find)
    (tmp_path / "lines").write_text("{}\n")
    with pytest.raises(CheckpointError, match=r"cannot read .*lines: "):
        read_groups(tmp_path / "lines", find)


def test_columns_that_are_not_those_of_samples_are_named(saved):
    path, table = saved
    for wrong, message in (
        (table.drop_columns(["turns"]), "the column 'turns' is missing"),
        (table.append_column("more", table["group"]), r"the column 'more' is not one of \['group',"),
        (
            table.set_column(0, "group", table["group"].cast(pa.int32())),
            "the column 'group' is of type int32; allowed: int64",
        ),
        (table.select(table.schema.names[::-1]), r"its columns are in the order \['exact',"),
    ):
        rewritten(path, wrong)
        with pytest.raises(CheckpointError, match=f"ready.arrow does not hold samples: {message}"):
            read_groups(path, find)


def test_a_sample_that_is_missing_is_named(saved):
    path, table = saved
    rewritten(path, table.take([0, 2]))
    with pytest.raises(CheckpointError, match=r"row 2 is sample 2 of group 3; expected sample 1 .* A row is missing"):
        read_groups(path, find)
    rewritten(path, table.take([1]))
    with pytest.raises(CheckpointError, match=r"row 1 is not a sample: IndexError"):
        read_groups(path, find)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("status", "lost", "TypeError: status: .*got str 'lost'"),
        ("group", None, "TypeError: group: .*got NoneType"),
        ("row", None, "TypeError: row.index"),
        ("turns", None, "TypeError"),
        ("rewards", None, "AttributeError"),
        ("index", None, "TypeError"),
    ],
)
def test_values_of_a_wrong_kind_are_named(saved, name, value, message):
    path, table = saved
    column = table.schema.get_field_index(name)
    values = pa.array([value, *table[name].to_pylist()[1:]], table.schema.field(name).type)
    rewritten(path, table.set_column(column, table.schema.field(name), values))
    with pytest.raises(CheckpointError, match=f"row 1 is not a sample: {message}"):
        read_groups(path, find)


def test_a_turn_without_tokens_or_with_an_unknown_end_is_named(saved):
    path, table = saved
    column = table.schema.get_field_index("turns")
    for name, value in (("ids", None), ("finish", "later"), ("sampled", None), ("versions", [[0]])):
        rows = table["turns"].to_pylist()
        rows[1][1][name] = value
        rewritten(path, table.set_column(column, "turns", pa.array(rows, table.schema.field("turns").type)))
        with pytest.raises(CheckpointError, match=r"row 2 is not a sample: TypeError: .*" + name):
            read_groups(path, find)
