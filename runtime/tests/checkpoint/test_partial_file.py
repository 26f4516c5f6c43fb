"""A file made in parts: whole or absent, gone on with behind the last whole part, never of two different things."""

import pytest
from rlhf.errors import ConfigError
from rlhf_runtime.checkpoint.partial_file import PartialFile


def file(tmp_path, **about):
    return PartialFile(tmp_path / "out.jsonl", {"data": "a", "seed": 0, **about})


def test_publishing_writes_the_file_and_removes_the_parts(tmp_path):
    made = file(tmp_path)
    assert list(made.resume()) == []
    made.add({"n": 1, "lines": ["one", "zwei ü"]})
    made.add({"n": 2, "lines": []})
    made.add({"n": 3, "lines": ["three"]})
    assert not made.path.exists()
    assert [part["n"] for part in file(tmp_path).resume()] == [1, 2, 3]
    made.publish("lines")
    assert made.path.read_text() == "one\nzwei ü\nthree\n"
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("torn", [b'{"n": 2, "li', b'{"n": 2, "lines": []}'])
def test_a_part_that_was_not_finished_is_made_again(tmp_path, torn):
    made = file(tmp_path)
    assert list(made.resume()) == []
    made.add({"n": 1, "lines": ["one"]})
    with made.partial.open("ab") as open_file:
        open_file.write(torn)
    again = file(tmp_path)
    assert [part["n"] for part in again.resume()] == [1]
    again.add({"n": 2, "lines": ["two"]})
    again.publish("lines")
    assert again.path.read_text() == "one\ntwo\n"


def test_an_incomplete_first_line_starts_a_new_file(tmp_path):
    made = file(tmp_path)
    made.partial.write_bytes(b'{"data"')
    assert list(made.resume()) == []
    made.add({"lines": ["one"]})
    assert len(list(file(tmp_path).resume())) == 1


def test_parts_of_another_input_are_refused_naming_the_difference(tmp_path):
    made = file(tmp_path)
    list(made.resume())
    with pytest.raises(ConfigError, match=r"begun with another data, another seed. .*--force"):
        list(file(tmp_path, data="b", seed=1).resume())
    made.discard()
    assert list(file(tmp_path, data="b").resume()) == []
