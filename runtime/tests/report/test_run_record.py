"""Records of runs with damaged files."""

from __future__ import annotations

import pytest
from rlhf_runtime.report.run_record import RunRecord


@pytest.mark.parametrize("step", ["null", '"x"', "[]", "{}"])
def test_a_line_without_a_number_of_a_step_is_no_evaluation(tmp_path, step):
    lines = [f'{{"step": {step}, "eval/reward": 2.0}}', '{"step": 1, "eval/reward": 1.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert RunRecord.read(tmp_path).best.value == 1.0


def test_data_that_are_no_list_of_sources_are_not_shown(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    for train, paths in (('"a.jsonl"', ""), ('[{path = "a.jsonl"}, 3, {path = "b.jsonl"}]', "a.jsonl, b.jsonl")):
        (tmp_path / "config.toml").write_text(f"[data]\ntrain = {train}\n")
        assert RunRecord.read(tmp_path).data == paths
