"""Rows and models given as objects become files that are read back as the same."""

from __future__ import annotations

import datetime
import errno
import json
import os
from pathlib import Path

import pytest
from rlhf.errors import ConfigError, DataError
from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.data.loading import load_source
from rlhf_runtime.python.object_files import ObjectFiles
from rlhf_testing.tiny import tiny_model

ROWS = [
    {"prompt": "1+1=", "answer": 2, "weights": [0.5, None, True], "more": {"a": "\u2028ä\n"}},
    {"prompt": "2+2=", "extra": 1.5},
]


def read(path: str) -> list[dict]:
    source = load_source(SourceSection(path=path, name="train"))
    return [source.read(index) for index in range(len(source))]


def test_rows_are_read_back_as_they_were_given(tmp_path):
    path = ObjectFiles(tmp_path / "run").rows("train", ROWS)
    assert Path(path).parent == tmp_path / "run" / "objects"
    assert read(path) == ROWS


@pytest.mark.linux("elsewhere there is no /proc")
def test_the_content_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    """After a loss of power, a file of the right name and another content would be read as the given rows."""
    forced, fsync, rename = [], os.fsync, os.rename

    def force(number):
        forced.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def named(old, new):
        assert str(old) in forced
        rename(old, new)

    monkeypatch.setattr(os, "fsync", force)
    monkeypatch.setattr(os, "rename", named)
    assert read(ObjectFiles(tmp_path).rows("train", ROWS)) == ROWS


def test_an_iterable_is_read_once(tmp_path):
    reads = []

    def rows():
        for row in ROWS:
            reads.append(row)
            yield row

    assert read(ObjectFiles(tmp_path).rows("train", rows())) == ROWS
    assert reads == ROWS


def test_a_file_is_named_by_its_content(tmp_path):
    files = ObjectFiles(tmp_path)
    first = files.rows("train", ROWS)
    assert files.rows("train", iter(ROWS)) == first
    assert files.rows("train", ROWS[:1]) != first
    assert sorted(p.suffix for p in (tmp_path / "objects").iterdir()) == [".jsonl", ".jsonl"]


def test_a_dataset_keeps_its_selected_rows_and_its_types(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list([{"prompt": str(n), "n": n} for n in range(5)])
    path = ObjectFiles(tmp_path).rows("train", dataset.select([3, 1]))
    assert read(path) == [{"prompt": "3", "n": 3}, {"prompt": "1", "n": 1}]
    assert ObjectFiles(tmp_path).rows("train", datasets.Dataset.from_list(read(path))) == path
    assert [p.name for p in (tmp_path / "objects").iterdir()] == [Path(path).name]


def test_a_pandas_frame_is_its_rows_without_the_index(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = [{"prompt": [{"role": "user", "content": "a"}], "n": 1, "x": 0.5}, {"prompt": [], "n": 2, "x": None}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    for frame in (pandas.DataFrame(rows, index=["i", "j"]), pandas.read_parquet(tmp_path / "a.parquet")):
        assert read(ObjectFiles(tmp_path).rows("train", frame)) == rows
    with pytest.raises(DataError, match="row 0, 'day': got Timestamp"):
        ObjectFiles(tmp_path).rows("train", pandas.DataFrame({"day": pandas.to_datetime(["2020-01-01"])}))


def test_tables_add_no_arguments_of_other_tools(tmp_path):
    """A table has the fields of all calls in every call, as null. From all objects, rows are those of its file."""
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")

    def called(**arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "assistant", "content": "a", "tool_calls": [call]}], "more": {"x": None}}

    rows, path = [called(city="Paris"), called(day="1")], str(tmp_path / "rows.parquet")
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(path)
    assert read(path) == rows
    for data in (table, table.to_iterable_dataset(), pandas.read_parquet(path)):
        assert read(ObjectFiles(tmp_path).rows("train", data)) == rows
    assert read(ObjectFiles(tmp_path).rows("train", list(table))) == list(table)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], r"train data: no rows\. Give a list of dicts"),
        (["1+1="], r"train data, row 0: a row must be a dict of columns, got str '1\+1='"),
        ([{"a": 1}, {"a": float("nan")}], r"row 1, 'a': nan is not a JSON value"),
        ([{"a": {"b": [1, {2}]}}], r"row 0, 'a', 'b'\[1\]: got set \{2\}; allowed: text, numbers"),
        ([{"a": (1, 2)}], r"row 0, 'a': got tuple \(1, 2\); allowed: .* Convert it: list\(\.\.\.\)"),
        ([{"a": datetime.date(2020, 1, 1)}], r"row 0, 'a': got date"),
        ([{1: "a"}], r"row 0: a name must be a string, got int 1"),
        ([{"a": "\ud800"}], r"row 0: a string is not valid Unicode"),
    ],
)
def test_a_row_that_json_does_not_give_back_is_refused(tmp_path, rows, problem):
    files = ObjectFiles(tmp_path / "run")
    with pytest.raises(DataError, match=problem):
        files.rows("train", rows)
    files.remove()
    assert not (tmp_path / "run").exists()


def test_what_was_written_is_removed_with_the_folders_that_were_made_for_it(tmp_path):
    files = ObjectFiles(tmp_path / "runs" / "1")
    files.rows("train", ROWS)
    files.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_deleted_hides_no_error(tmp_path, loaded, monkeypatch):
    """As on NFS, where a folder keeps a file that this process has open. The start has failed for another reason."""
    files = ObjectFiles(tmp_path / "run")
    files.model(*loaded)

    def refuse(*arguments, **options):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        files.remove()
    assert (tmp_path / "run").exists()


def test_removing_leaves_the_files_of_an_earlier_run(tmp_path):
    old_path = ObjectFiles(tmp_path).rows("train", ROWS)
    files = ObjectFiles(tmp_path)
    assert files.rows("train", ROWS) == old_path
    files.rows("eval", ROWS)
    files.remove()
    assert [str(p) for p in (tmp_path / "objects").iterdir()] == [old_path]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tiny_model(tmp_path_factory.mktemp("model"), hidden=8, heads=2, kv_heads=1)
    return AutoModelForCausalLM.from_pretrained(str(path)), AutoTokenizer.from_pretrained(str(path))


def test_a_model_is_saved_with_its_tokenizer_and_named_by_its_weights(tmp_path, loaded):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = loaded
    path = ObjectFiles(tmp_path).model(model, tokenizer)
    saved = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(path).get_vocab() == tokenizer.get_vocab()
    assert ObjectFiles(tmp_path).model(model, tokenizer) == path
    weight = next(saved.parameters())
    with torch.no_grad():
        weight.add_(1)
    assert ObjectFiles(tmp_path).model(saved, tokenizer) != path


def test_a_model_without_a_tokenizer_is_refused(tmp_path, loaded):
    message = r"a Qwen3ForCausalLM object was passed without its tokenizer\. Add tokenizer="
    with pytest.raises(ConfigError, match=message):
        ObjectFiles(tmp_path).model(loaded[0], None)


def test_an_object_that_is_not_a_model_or_tokenizer_is_refused(tmp_path, loaded):
    with pytest.raises(ConfigError, match=r"model: a dict object is not a transformers model"):
        ObjectFiles(tmp_path).model({}, loaded[1])
    with pytest.raises(ConfigError, match=r"tokenizer: expected a transformers tokenizer, got str 'path'"):
        ObjectFiles(tmp_path).model(loaded[0], "path")


@pytest.mark.slow  # imports all of peft
def test_a_model_with_adapters_is_refused(tmp_path, loaded):
    peft = pytest.importorskip("peft")
    import copy

    adapted = peft.get_peft_model(copy.deepcopy(loaded[0]), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"has adapters \(peft\)\. Merge them first, model\.merge_and_unload\(\)"):
        ObjectFiles(tmp_path).model(adapted, loaded[1])


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.output .*file.* cannot be written to"):
        ObjectFiles(tmp_path / "file").rows("train", ROWS)


def test_rows_keep_text_beyond_ascii_readable(tmp_path):
    path = ObjectFiles(tmp_path).rows("train", [{"prompt": "ä"}])
    assert json.loads(Path(path).read_text(encoding="utf-8")) == {"prompt": "ä"}
    assert "ä" in Path(path).read_text(encoding="utf-8")
