"""Whole runs of LUFFY: groups whose first sample is the data's answer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from tests.runs import Workshop, assert_same_run
from tests.test_resume import Runs, config


def test_the_first_sample_of_each_group_is_the_data_s_answer(shop: Workshop) -> None:
    """It is scored as the others are. In evaluations the policy answers."""
    prompts = [{"prompt": f"{a}+1=", "answer": str(a + 1), "response": f"It is {a + 1}."} for a in range(5)]
    run = shop.train(
        "luffy",
        "run",
        data={"train": str(shop.rows("rows.jsonl", prompts)), "eval": [{"path": str(shop.data), "name": "held_out"}]},
        eval={"every": 3},
        algorithm={"demonstrations_per_group": 2},
    )
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for sample in run.samples():
        groups[sample["group"]].append(sample)
    assert len(groups) == 12
    for samples in groups.values():
        samples.sort(key=lambda sample: sample["sample"])
        assert [sample["turns"][1]["is_demonstration"] for sample in samples] == [True, True, False]
        first, second, answer = samples
        row = next(row for row in prompts if row["prompt"] == first["turns"][0]["text"])
        assert first["turns"][1]["text"] == second["turns"][1]["text"] == row["response"]
        assert first["reward"] == second["reward"] > 1
        assert answer["turns"][1]["logprobs"] is not None
    texts = shop.command("samples", str(run.path), "--group", "8").out.split("\n\n")[1:]
    assert ["the answer is from the data" in text for text in texts] == [True, True, False]
    lines = run.lines()
    assert all(0 < line["policy/demonstration_prob"] < 0.5 for line in lines)
    assert lines[-1]["eval/reward"] < 0.9


@pytest.mark.full  # its groups are saved as those of grpo, which test_resume.py kills
def test_a_killed_and_resumed_run_ends_with_equal_weights(forks: Any, shop: Workshop) -> None:
    runs = Runs(forks, shop)
    baseline, broken = (config(shop, "luffy", name, staleness=2) for name in ("whole", "broken"))
    reference = runs.start(baseline)
    runs.die_at(broken, "step 4")
    finished, expected = runs.resume(broken), runs.result(baseline, reference)
    assert expected.code == 0, expected.err
    assert_same_run(finished, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": {"demonstrations_per_group": 3}}, "set --sampling.samples_per_prompt 4 or more"),
        ({"algorithm": {"loss": {"correction": {"preset": "tis"}}}}, "for which the generator reports no log-probs"),
        ({"data": {"response": "solution"}}, "no column 'solution'"),
        ({"algorithm": {"teacher": {"coef": 1.0, "task": False}}}, "teacher.task = false does not use the reward"),
    ],
)
def test_options_that_do_not_fit_are_refused(shop: Workshop, options: dict[str, Any], message: str) -> None:
    assert message in shop.run("luffy", "run", **options).err
