import json
import math
import tracemalloc

import pytest
from rlhf.errors import CheckpointError
from rlhf_runtime.output.metrics import MetricsLog, read_metrics, read_series


def test_lines_are_exact_and_in_order(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(0, {"eval/pass@1": 1 / 3})
    log.append(1, {"loss": 0.1 + 0.2, "grad_norm": math.nan, "time/step": 0.5})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 0, "eval/pass@1": 1 / 3}
    assert "NaN" not in lines[1]  # other JSON readers stop at it
    (_, line) = read_metrics(log.path)
    assert line["loss"] == 0.1 + 0.2
    assert math.isnan(line["grad_norm"])
    assert read_metrics(tmp_path / "missing") == []


def test_a_step_is_logged_once(tmp_path):
    MetricsLog(tmp_path / "m").append(2, {"a": 1.0})
    with pytest.raises(CheckpointError, match=r"already holds step 2; step 2 cannot be added"):
        MetricsLog(tmp_path / "m").append(2, {"a": 1.0})
    with pytest.raises(CheckpointError, match="a metric is named 'step'"):
        MetricsLog(tmp_path / "m").append(3, {"step": 1.0})
    with pytest.raises(CheckpointError, match=r"metrics of step 3\.a is a list|metrics of step 3\.a is a object"):
        MetricsLog(tmp_path / "m").append(3, {"a": object()})


def test_cut_drops_later_lines_and_a_half_written_one(tmp_path):
    log = MetricsLog(tmp_path / "m")
    for step in (1, 2, 3):
        log.append(step, {"a": step / 7, "b": math.inf})
    lines = (tmp_path / "m").read_text().splitlines(keepends=True)[:2]
    with (tmp_path / "m").open("a") as file:
        file.write('{"step": 4, "a": 0.')
    second = MetricsLog(tmp_path / "m")
    assert [line["step"] for line in read_metrics(second.path)] == [1, 2, 3]
    with pytest.raises(CheckpointError, match="ends in the middle of a line"):
        second.append(4, {})
    assert second.cut(2) == 1
    assert (tmp_path / "m").read_text() == "".join(lines)  # byte for byte
    second.append(3, {"a": 3 / 7})
    assert [line["step"] for line in read_metrics(second.path)] == [1, 2, 3]
    assert MetricsLog(tmp_path / "missing").cut(0) == 0


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "m").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"m:2 is not valid JSON.*Restore the file, or delete that line"):
        read_metrics(tmp_path / "m")
    (tmp_path / "m").write_text('{"a": 1}\n')
    with pytest.raises(CheckpointError, match=r"m:1 is not a step's metrics"):
        read_metrics(tmp_path / "m")


def test_a_resume_keeps_the_bytes_of_a_long_run_and_needs_no_memory_for_them(tmp_path):
    """A run of weeks has so many lines that their values take gigabytes."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    path, values = log.path, {f"metric/{n}": n + 0.5 for n in range(100)}
    lines = [json.dumps({"step": step, **values}).encode() + b"\n" for step in range(1, 501)]
    path.write_bytes(b"".join(lines))
    tracemalloc.start()
    try:
        assert log.missing(500) == ""
        assert log.cut(499) == 1
        log.append(500, values)
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 2
    finally:
        tracemalloc.stop()
    assert path.read_bytes().startswith(b"".join(lines[:499]))
    assert len(read_metrics(path)) == 500


def test_the_numbers_of_a_long_run_need_less_memory_than_its_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": n, **{f"a/rather/long/name/{m}": n / (m + 1) for m in range(40)}} for n in range(1000)]
    lines[7] |= {"late": 3, "a/rather/long/name/0": {"$float": "nan"}, "no/number": None}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tracemalloc.start()
    try:
        series = read_series(path)
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 2
    finally:
        tracemalloc.stop()
    assert [*series] == [*(f"a/rather/long/name/{m}" for m in range(40)), "late", "no/number"]
    assert [*series["late"].steps, *series["late"].values, *series["no/number"].values] == [7, 3.0]
    assert math.isnan(series["a/rather/long/name/0"].values[7])
    for m in range(1, 40):
        assert [*series[f"a/rather/long/name/{m}"].values] == [n / (m + 1) for n in range(1000)]
    assert [*read_series(path, last=9)["a/rather/long/name/1"].steps] == [*range(10)]
