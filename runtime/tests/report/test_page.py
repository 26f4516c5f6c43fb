"""What the page about a run holds of a large run."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlhf_runtime.report.page import RecordedGroup, answer_rows, chosen


def test_the_samples_of_a_large_run_are_whole_groups_from_end_to_end() -> None:
    groups = [RecordedGroup(step, ("rows", step * 4 % 300 + n), range(4 * n, 4 * n + 4))
              for step in range(1, 101) for n in range(4)]  # fmt: skip
    picked = chosen(groups, 200)
    assert 0.8 * 200 <= sum(len(group.rows) for group in picked) <= 200
    assert picked == chosen(groups, 200)
    assert {1, 100} <= {group.step for group in picked}
    prompts = [group.prompt for group in picked]
    assert sum(prompts.count(prompt) > 1 for prompt in {*prompts}) >= 5
    assert chosen(groups, 1600) == groups


def test_the_answers_of_a_large_evaluation_are_those_to_whole_prompts_of_all_sources(tmp_path: Path) -> None:
    """The number of answers may differ between prompts: not every agent has a turn in every game."""
    sizes = [3 + prompt % 3 for prompt in range(1000)]
    prompts = [prompt for prompt, size in enumerate(sizes) for _ in range(size)]
    text = "".join(f'{{"group": {prompt}, "sample": 0}}\n' for prompt in prompts)
    (tmp_path / "step-000001.jsonl").write_text(text)
    rows = answer_rows(tmp_path / "step-000001.jsonl")
    assert len(rows) == pytest.approx(100, abs=20)
    numbers = {prompts[row] for row in rows}
    assert {row for row, prompt in enumerate(prompts) if prompt in numbers} == rows
    assert (min(rows), max(rows)) == (0, len(prompts) - 1)
    (tmp_path / "empty.jsonl").write_text("")
    assert answer_rows(tmp_path / "empty.jsonl") == set()
