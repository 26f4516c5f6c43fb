"""A file made in parts: whole or absent, gone on with behind the last whole part, never of two different things."""

import pytest
from rlhf.errors import CheckpointError, ConfigError
from rlhf_cli.jobs.score_answers import PartialFile


def file(tmp_path, **inputs):
    return PartialFile(tmp_path / "out.jsonl", {"data": "a", "seed": 0, **inputs})


def test_publishing_writes_the_file_and_removes_the_parts(tmp_path):
    output = file(tmp_path)
    assert list(output.resume()) == []
    output.add({"n": 1, "lines": ["one", "zwei ü"]})
    output.add({"n": 2, "lines": []})
    output.add({"n": 3, "lines": ["three"]})
    assert not output.path.exists()
    assert [part["n"] for part in file(tmp_path).resume()] == [1, 2, 3]
    output.publish()
    assert output.path.read_text() == "one\nzwei ü\nthree\n"
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("torn", [b'{"n": 2, "li', b'{"n": 2, "lines": []}'])
def test_a_part_that_was_not_finished_is_made_again(tmp_path, torn):
    output = file(tmp_path)
    assert list(output.resume()) == []
    output.add({"n": 1, "lines": ["one"]})
    with output.partial.open("ab") as open_file:
        open_file.write(torn)
    second = file(tmp_path)
    assert [part["n"] for part in second.resume()] == [1]
    second.add({"n": 2, "lines": ["two"]})
    second.publish()
    assert second.path.read_text() == "one\ntwo\n"


def test_the_parts_are_kept_if_the_file_cannot_be_written(tmp_path):
    output = file(tmp_path)
    assert list(output.resume()) == []
    output.add({"lines": ["one"]})
    output.path.mkdir()
    with pytest.raises(CheckpointError, match=r"out\.jsonl could not be written: .*are kept in .*\.partial"):
        output.publish()
    output.path.rmdir()
    output.publish()
    assert output.path.read_text() == "one\n"


def test_of_two_processes_with_one_file_only_one_continues(tmp_path):
    output, second = file(tmp_path), file(tmp_path)
    assert list(output.resume()) == list(second.resume()) == []
    output.add({"lines": ["one"]})
    with pytest.raises(CheckpointError, match=r"another process writes to .*out\.jsonl\.partial"):
        second.add({"lines": ["one"]})
    output.publish()
    with pytest.raises(CheckpointError, match="another process writes"):
        second.add({"lines": ["two"]})
    assert not output.partial.exists()
    assert output.path.read_text() == "one\n"


def test_an_incomplete_first_line_starts_a_new_file(tmp_path):
    output = file(tmp_path)
    output.partial.write_bytes(b'{"data"')
    assert list(output.resume()) == []
    output.add({"lines": ["one"]})
    assert len(list(file(tmp_path).resume())) == 1


def test_parts_of_another_input_are_refused_naming_the_difference(tmp_path):
    output = file(tmp_path)
    list(output.resume())
    with pytest.raises(ConfigError, match=r"started with different values of data, seed. .*--force"):
        list(file(tmp_path, data="b", seed=1).resume())
    output.discard()
    assert list(file(tmp_path, data="b").resume()) == []
