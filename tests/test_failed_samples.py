"""A rollout or a reward that fails gives no reward: the run says why, and ends where too many fail."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from rlhf_cli.main import main

from tests.runs import Workshop
from tests.test_bad_input import refused


def hanging(shop: Workshop, rows: str) -> dict[str, Any]:
    """An environment that never answers in those rows, and gives 1 in the others."""
    text = f"""
import asyncio
from rlhf.interfaces import Env
from rlhf.types import EnvStep
class Hanging(Env):
    async def reset(self, row, seed):
        self.row = row
        return ""
    async def step(self, action):
        if self.row.index {rows}:
            await asyncio.sleep(60)
        return EnvStep(reward=1.0, done=True)
"""
    return {
        "env": {"use": f"file:{shop.file('hanging.py', text)}", "deadline": 0.2},
        "rollout": {"use": "multi_turn"},
        "reward": None,
        "data": {"shuffle": False},
        "run": {"steps": 2},
    }


def test_an_environment_that_always_hangs_ends_the_run_at_once(shop: Workshop) -> None:
    run = shop.run("rloo", "run", stream={"on_failed_sample": "drop_group"}, **hanging(shop, ">= 0"))
    error = refused(run, "of the latest 12 samples failed, and stream.max_failed = 0.5", "deadline of 0.2 s", code=1)
    assert "env 'hanging'" in error
    assert run.out.count("step() took longer than its deadline") == 1, "the first cause, once"
    assert not run.lines(), "no step was made of nothing"


def test_failures_are_printed_at_the_first_one_and_in_the_last_line(shop: Workshop) -> None:
    changes = hanging(shop, "== 1") | {"stream": {"on_failed_sample": "drop_sample"}}
    reward = shop.file("length.py", "async def score(prompt, completion, row):\n    return len(completion) / 7\n")
    run = shop.train("rloo", "run", **changes | {"reward": [{"use": f"file:{reward}"}]})
    notes = [line for line in run.out.splitlines() if "failed: EnvError" in line]
    assert len(notes) == 1
    assert "of row 1 of" in notes[0]
    assert '(stream.on_failed_sample = "drop_sample")' in run.out
    assert run.out.splitlines()[-2] == f"finished, 3 of 27 samples failed (11.1 %): {run.path}", "a group was refilled"


def test_the_last_line_of_a_resumed_run_counts_the_samples_since_the_resume(shop: Workshop) -> None:
    code = "async def score(prompt, completion, row):\n    return {'0': 0.0, '1': 1.0}[row['answer']]\n"
    rows = [{"prompt": "0+0=", "answer": "0"}, {"prompt": "0+1=", "answer": "1"}, {"prompt": "1+1=", "answer": "2"}]
    run = shop.train(
        "rloo",
        "run",
        run={"steps": 3, "stop_after": 1},
        data={"train": str(shop.rows("rows.jsonl", rows)), "batch_size": 3},
        reward=[{"use": f"file:{shop.file('known.py', code)}"}],
        stream={"on_failed_sample": "drop_sample"},
    )
    assert re.search(r"\nstopped, \d+ of \d+ samples failed \(\S+ %\): ", run.out)
    resumed = shop.command("train", str(run.path / "config.toml"), "--resume", "--run.stop_after", "3")
    failed, prompts = (sum(line[f"stream/{n}"] for line in run.lines()[1:]) for n in ("failed_samples", "prompts"))
    line = rf"finished, {failed:.0f} of {3 * prompts:.0f} samples failed \(\S+ %\) since the resume: {run.path}"
    assert re.search(line, resumed.out)


def test_a_reward_that_fails_for_bad_answers_does_not_look_better(shop: Workshop) -> None:
    """It raises where it would be 0, so the mean of the others is 1."""
    text = """
async def score(prompt, completion, row):
    if sum(map(ord, completion)) % 2:
        raise ValueError("odd" if sum(map(ord, completion)) % 3 else "divisible by three")
    return 1.0
"""
    reward = [{"use": f"file:{shop.file('fails.py', text)}"}]
    stream = {"on_failed_sample": "drop_sample", "max_failed": 1.0}
    run = shop.train("rloo", "run", run={"steps": 2}, reward=reward, stream=stream)
    for line in run.lines():
        failed, samples = line["stream/failed_samples"], 3 * line["stream/prompts"]
        assert failed > 0
        assert line["stream/scored"] == samples - failed, "also in groups with too few samples to train on"
        assert line["reward/mean"] == 1.0
        assert line["reward/mean_with_failed"] == pytest.approx(1 - failed / samples)
    assert run.out.count("see the metric reward/mean_with_failed") == 1
    assert "with_failed=" in run.out
    for cause in ("odd", "divisible by three"):
        assert re.search(rf"failed: .*{cause} .*\n(.*\n)*  \d+: .*{cause} ", run.out), "first, and at the end"


def test_a_run_whose_reward_always_times_out_fails(shop: Workshop) -> None:
    text = "import asyncio\nasync def score(prompt, completion, row):\n    await asyncio.sleep(60)\n"
    judge = {"use": f"file:{shop.file('judge.py', text)}", "deadline": 0.2}
    run = shop.run("rloo", "run", reward=[judge], stream={"on_failed_sample": "drop_group"})
    refused(run, "samples failed, and stream.max_failed", "score() took longer than its deadline of 0.2 s", code=1)


def test_a_run_with_max_failed_1_continues_and_names_the_first_cause_at_its_end(shop: Workshop) -> None:
    text = "async def score(prompt, completion, row):\n    raise ValueError('no judge')\n"
    stream = {"on_failed_sample": "drop_sample", "max_failed": 1.0}
    options = {"data": {"shuffle": False}, "run": {"steps": 1}}
    run = shop.run("rloo", "run", stream=stream, reward=[{"use": f"file:{shop.file('judge.py', text)}"}], **options)
    refused(run, "not one update", "samples failed (100 %); the first: 0 of row 0", "no judge", code=1)


def test_a_share_outside_of_zero_to_one_is_refused(shop: Workshop) -> None:
    refused(shop.run("rloo", "run", stream={"max_failed": 5}), "stream.max_failed", "less than or equal to 1")


# ------------------------------------------------------------------------------------------ evaluation


def judged(shop: Workshop, rows: str) -> dict[str, Any]:
    """A reward that raises for those rows of evaluation and for none of training."""
    held_out = shop.rows("held.jsonl", [{"prompt": f"{n}+1=", "answer": str(n)} for n in range(4)])
    text = f"""
async def score(prompt, completion, row):
    if row.get("response") is None and int(row["answer"]) {rows}:
        raise ConnectionError("the judge is down")
    return len(completion) / 7
"""
    return {"data": {"eval": str(held_out)}, "reward": [{"use": f"file:{shop.file('judge.py', text)}"}]}


def test_an_evaluation_with_too_many_failures_ends_the_run_and_keeps_its_steps(shop: Workshop) -> None:
    run = shop.run("rloo", "run", run={"steps": 2}, eval={"every": 1}, **judged(shop, "> 0"))
    refused(run, "3 of the latest 4 evaluation samples failed", "ConnectionError: the judge is down", code=1)
    assert run.last_checkpoint.name.endswith("1")


def test_an_evaluation_with_few_failures_reports_them(shop: Workshop) -> None:
    run = shop.train("rloo", "run", run={"steps": 2}, eval={"every": 1}, **judged(shop, "== 0"))
    assert [line["eval/failed"] for line in run.lines()] == [0.25, 0.25]
    assert run.out.count("the judge is down") == 1
    assert run.out.splitlines()[-2] == f"finished, 2 of 8 evaluation samples failed (25 %): {run.path}"


def test_rlhf_eval_reports_failures_and_stops_after_too_many(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(rows: str, *flags: str) -> tuple[int, str, str]:
        _, path = shop.arguments(shop.config("rloo", "run", **judged(shop, rows)))
        code = main(["eval", path, "--json", *flags])
        return code, *capsys.readouterr()

    code, out, err = evaluate("== 0")
    assert code == 0, err
    assert json.loads(out)["failed"] == 0.25
    assert "note: evaluation sample 0 of row 0 of" in err
    assert err.count("row 0 of") == 1, "the message names the sample once"
    assert "the judge is down" in err
    code, out, err = evaluate("> 0")
    assert (code, out) == (1, "")
    assert "3 of the latest 4 evaluation samples failed, and stream.max_failed = 0.5" in err
    code, out, _ = evaluate("> 0", "--stream.max_failed", "0.9")
    assert json.loads(out)["failed"] == 0.75
