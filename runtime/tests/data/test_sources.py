"""Sources: every kind of file, rows with file and line, and what is wrong said clearly."""

from __future__ import annotations

import gzip
import json

import pytest
from rlhf.errors import DataError
from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.data.loading import JoinedSource, load_source

ROWS = [{"prompt": f"p{i}", "n": i, "tags": ["a", "b"]} for i in range(5)]


def source(path, **fields):
    return load_source(SourceSection(path=str(path), **fields))


def refused(path, **fields) -> str:
    with pytest.raises(DataError) as error:
        source(path, **fields)
    return str(error.value)


def lines(rows):
    return "".join(json.dumps(r) + "\n" for r in rows)


def write_every_kind(folder):
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(ROWS)
    (folder / "a.jsonl").write_text(lines(ROWS))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    (folder / "c.json").write_text(json.dumps(ROWS, indent=1))
    (folder / "d.json").write_text(lines(ROWS))
    pq.write_table(table, folder / "e.parquet")
    with pa.OSFile(str(folder / "f.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(folder / "g.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "h")
    return sorted(p for p in folder.iterdir())


def test_every_kind_gives_the_same_rows(tmp_path):
    for path in write_every_kind(tmp_path):
        data = source(path)
        assert [data[i].columns for i in range(len(data))] == ROWS, path
        assert data.columns == ["prompt", "n", "tags"]
        assert (data[3].source, data[3].index) == (path.name.split(".")[0], 3)
        assert len(source(path, max_rows=2)) == 2


def test_files_of_one_split_may_have_different_columns(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, table in (("a", {"prompt": ["p"], "label": [1]}), ("b", {"prompt": ["q"]})):
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    data = JoinedSource(SourceSection(path="hub"), [source(tmp_path / f"{name}.parquet") for name in "ab"])
    assert (data.columns, list(data.values("label"))) == (["prompt", "label"], [1, None])


def test_string_views_are_read_as_text(tmp_path):
    """What polars writes to arrow files; pyarrow takes no rows of it."""
    import pyarrow as pa

    kinds = [("p", pa.string_view()), ("n", pa.list_(pa.struct([("x", pa.string_view()), ("y", pa.int64())])))]
    rows = [{"p": "a", "n": [{"x": "b", "y": 1}]}, {"p": None, "n": []}]
    table = pa.Table.from_pylist(rows, schema=pa.schema(kinds))
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = source(tmp_path / "a.arrow")
    assert [data[i].columns for i in range(2)] == rows


def test_csv_cells_are_text(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,label\n"1, 2\n3",007\n\nx,\n')
    data = source(tmp_path / "a.csv")
    assert [data[i].columns for i in range(2)] == [{"prompt": "1, 2\n3", "label": "007"}, {"prompt": "x", "label": ""}]
    assert data.location(1).endswith("a.csv, line 5")


def test_jsonl_skips_blank_lines_and_a_byte_order_mark_and_knows_lines(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"b": "\xc3\xa9"}')
    data = source(tmp_path / "a.jsonl")
    assert data.columns == ["a", "b"]
    assert [data[i].columns for i in range(2)] == [{"a": 1}, {"b": "é"}]
    assert data.location(1).endswith("a.jsonl, line 4")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": 2\n', "a.jsonl, line 2, column 8: not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n\n[1]\n', "a.jsonl, line 3: a row must be a JSON object, got list [1]"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "a.jsonl, line 2: not UTF-8 text"),
        ("a.json", b'[{"a": 1},\n{"a" 2}]', "a.json, line 2, column 6: not valid JSON"),
        ("a.jsonl", b'{"a": 1}\n{"a": ' + b"[" * 100_000, "a.jsonl, line 2: nested too deeply"),
        ("a.json", b"[" * 100_000, "a.json: nested too deeply"),
        ("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "a.jsonl, line 1: an integer of more than 4300 digits is not read"),
        (
            "a.jsonl",
            b'{"a": 1}\r{"a": 2}\r',
            "not valid JSON: Extra data. Each row must be one line that ends with a line feed",
        ),
        (
            "a.json",
            b'[{"a": ' + b"9" * 5000 + b"}]",
            "a.json: an integer of more than 4300 digits is not read. Write it",
        ),
        ("a.jsonl", b'{"a": 1}\n{"a": NaN}\n', "a.jsonl, line 2: NaN is not a JSON number"),
        (
            "a.jsonl",
            b'{"a": 1e308}\n{"a": [-1e400]}\n',
            "a.jsonl, line 2: -1e400 is larger than the largest 64-bit number",
        ),
        ("a.json", b'[{"a": 1},\n {"a": 1e999}]', "a.json, row from line 2 on: 1e999 is larger than"),
        ("a.jsonl", b'{"a": {"b": [1, -Infinity]}}\n', "a.jsonl, line 1: -Infinity is not a JSON number"),
        ("a.jsonl", b'\n{"b": 1, "a": 1, "a": 2}\n', "a.jsonl, line 2: the key 'a' appears twice in one object"),
        ("a.jsonl", b'{"a": [{"b": 1, "b": 1}]}\n', "a.jsonl, line 1: the key 'b' appears twice in one object"),
        (
            "a.json",
            b'[{"a": "\xc3\xa9"},\n {"a": [1]}\n ,{"a":\n NaN}]',
            "a.json, row from line 3 on: NaN is not a JSON",
        ),
        ("a.json", b'\n[\n{"a": 1, "a": 2}]', "a.json, row from line 3 on: the key 'a' appears twice"),
        ("a.json", b'[{"a": 1}, 3]', "a.json, row 1: a row must be a JSON object, got int 3"),
        ("a.csv", b"a,b\n1,2\n1\n", "a.csv, line 3: 1 cells, but the header has 2"),
        ("a.csv", b"a,a\n1,2\n", "the header names 'a' twice"),
        ("a.csv", b"a,b\n1,\xff\n", "a.csv, line 2: not UTF-8 text"),
        ("a.jsonl", b"", "holds no rows"),
        ("a.jsonl", b"\n\n", "holds no rows"),
        ("a.csv", b"a,b\n", "holds no rows"),
        ("a.json", b"[]", "holds no rows"),
        ("a.jsonl.gz", b"not gzip", "cannot read"),
        ("a.parquet", b"not parquet", "as parquet"),
        ("a.arrow", b"not arrow", "as arrow"),
        ("a.txt", b"x", "unknown kind of file; allowed are .jsonl, .json"),
        ("a.parquet.gz", b"x", "unknown kind of file"),
    ],
)
def test_malformed_files_are_refused_with_the_line(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert expected in refused(tmp_path / name)


def test_the_error_for_a_missing_file_lists_existing_files(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    message = refused(tmp_path / "trian.jsonl")
    assert "no data file" in message
    assert "has the data files train.jsonl. Did you mean 'train.jsonl'?" in message
    assert "does not exist" in refused(tmp_path / "nowhere" / "a.jsonl")
    assert "not one that `datasets` saved (save_to_disk). Name one of its files: train.jsonl." in refused(tmp_path)


def test_audio_in_a_saved_folder_is_not_decoded(tmp_path):
    import datasets
    import pyarrow as pa

    features = datasets.Features(prompt=datasets.Value("string"), audio=datasets.Audio())
    table = pa.Table.from_pylist([{"prompt": "p", "audio": {"bytes": b"x", "path": None}}], features.arrow_schema)
    datasets.Dataset(table, info=datasets.DatasetInfo(features=features)).save_to_disk(tmp_path / "saved")
    assert source(tmp_path / "saved").read(0) == {"prompt": "p", "audio": {"bytes": b"x", "path": None}}


def test_splits_and_subsets(tmp_path):
    import datasets

    (tmp_path / "a.jsonl").write_text("{}\n")
    assert "split = 'test', but a file has neither" in refused(tmp_path / "a.jsonl", split="test")
    assert "subset = 'x', but a file has neither" in refused(tmp_path / "a.jsonl", subset="x")
    first, two = datasets.Dataset.from_list(ROWS[:2]), datasets.Dataset.from_list(ROWS[2:])
    datasets.DatasetDict({"train": first, "test": two}).save_to_disk(tmp_path / "both")
    assert source(tmp_path / "both", split="test")[0]["prompt"] == "p2"
    assert "has no split 'tets'; it has train, test. Did you mean 'test'?" in refused(tmp_path / "both", split="tets")
    first.save_to_disk(tmp_path / "one")
    assert "a single dataset without splits" in refused(tmp_path / "one", split="test")
    assert "a saved folder has no subsets" in refused(tmp_path / "one", subset="x")


def test_fingerprints_depend_on_the_content_only(tmp_path):
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(ROWS)
    for name, chunk in (("a", 1), ("b", 5)):
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=chunk)
    assert source(tmp_path / "a.parquet").fingerprint == source(tmp_path / "b.parquet").fingerprint
    new_table = pa.Table.from_pylist([*ROWS[:4], {**ROWS[4], "n": 9}])
    pq.write_table(new_table, tmp_path / "c.parquet")
    assert source(tmp_path / "a.parquet").fingerprint != source(tmp_path / "c.parquet").fingerprint
    assert source(tmp_path / "a.parquet").fingerprint != source(tmp_path / "a.parquet", max_rows=2).fingerprint
    for name in ("d", "e"):
        datasets.Dataset.from_list(ROWS).select([3, 1]).save_to_disk(tmp_path / name)
    assert source(tmp_path / "d")[0]["prompt"] == "p3"
    assert source(tmp_path / "d").fingerprint == source(tmp_path / "e").fingerprint


def test_rows_outside_are_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    with pytest.raises(IndexError, match="rows 0 to 1, got 2"):
        source(tmp_path / "a.jsonl", max_rows=2)[2]
