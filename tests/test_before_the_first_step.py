"""Mistakes that appear late in a run are found before its first step: a metric that no evaluation has, rows of a wrong
type. ``--dry-run`` finds those that need no model."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from rlhf.errors import DataError
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data import dataset
from rlhf_runtime.data.dataset import RowCheck, TrainData
from rlhf_runtime.loop.run import Run
from rlhf_runtime.setup import build

from tests.runs import PAIRS, PROMPTS, Finished, Workshop


def refused(
    shop: Workshop, algorithm: str, says: list[str], monkeypatch: pytest.MonkeyPatch, dry: bool = True, **changes: Any
):
    """Assert that a dry run refuses it before a model is loaded, and that a run refuses it before its first step."""
    with monkeypatch.context() as patch:
        patch.setattr(Run, "steps", lambda _: pytest.fail("a step begins"))
        if dry:
            patch.setattr(build, "launch_roles", lambda *_: pytest.fail("models are loaded"))
            run = shop.run(algorithm, "refused", "--dry-run", **changes)
            assert run.code == 2, run.said
            assert all(text in " ".join(run.said.split()) for text in says), run.said
        run = shop.run(algorithm, "refused", **changes)
    assert run.code != 0
    assert all(text in " ".join(run.said.split()) for text in says), run.said


# ---------------------------------------------------------------------------------------- eval.metric


def test_a_metric_of_answers_is_recognised_by_its_name(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    other = shop.rows("other.jsonl", PROMPTS[:3])
    single, pair = {"eval": str(shop.data)}, {"eval": [str(shop.data), str(other)]}
    cases: list[tuple[dict[str, Any], str, str]] = [
        (single, "eval/lenght", "Did you mean 'length'?"),
        (single, "avg@4", "it reports eval/length, eval/pass@1, eval/prompts, eval/reward, eval/score, eval/truncated"),
        (pair, "oter/pass@1", "Did you mean 'other/pass@1'?"),
        (single, "loss", "which the evaluation does not report"),
    ]
    for data, metric, says in cases:
        message = f"eval.metric is {metric!r}, which the evaluation does not report"
        refused(shop, "rloo", [message, says], monkeypatch, data=data, eval={"metric": metric})
    for data, metric in ((single, "pass@1"), (single, "eval/length"), (pair, "other/reward")):
        shop.train("rloo", "right", "--dry-run", data=data, eval={"metric": metric})


def test_a_metric_of_a_loss_is_computed_before_the_first_step(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"data": {"eval": str(shop.rows("held.jsonl", PAIRS[:4]))}}
    says = "eval.metric is 'los', which the evaluation does not report; it reports eval/"
    refused(shop, "dpo", [says], monkeypatch, dry=False, eval={"metric": "los"}, **changes)
    names = [name for name in shop.train("dpo", "plain", **changes).lines()[-1] if name.startswith("eval/")]
    metric = next(name for name in sorted(names) if "loss" not in name).removeprefix("eval/")
    run = shop.train("dpo", "own", eval={"metric": metric}, **changes)
    best = json.loads((run.path / "checkpoints" / "best.json").read_text())
    assert best["metric"] == f"eval/{metric}"


def test_a_run_file_can_be_evaluated_with_any_metric(shop: Workshop) -> None:
    from rlhf_cli.main import main

    config = shop.config("sft", "sft", data={"eval": str(shop.data)}, eval={"metric": "loss"})
    path = shop.arguments(config)[1]
    reward = f"file:{shop.file('reward.py', 'def score(prompt, completion, row):' + chr(10) + '    return 1.0')}"
    assert main(["eval", path, "--reward", reward, "--sampling.max_new_tokens", "2"]) == 0


# ----------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(("algorithm", "column"), [("rloo", "prompt"), ("dpo", "chosen")])
def test_a_row_of_a_wrong_type_is_found_before_the_first_step(
    shop: Workshop, algorithm: str, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [dict(row) for row in (PAIRS if algorithm == "dpo" else PROMPTS)]
    rows[-1][column] = 7
    data = {"data": {"train": str(shop.rows("wrong.jsonl", rows)), "shuffle": False}}
    says = f"wrong.jsonl, line {len(rows)}: column {column!r}: must be text, got int '7'. Correct the row"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "steps", lambda _: pytest.fail("a step begins"))
        for words in (("--dry-run",), ()):
            run = shop.run(algorithm, "wrong", *words, **data)
            assert run.code == 1, run.said
            assert says in " ".join(run.said.split())
    dropped = shop.train(algorithm, "dropped", data={**data["data"], "bad_rows": "drop"})
    assert dropped.lines()[-1]["data/bad_rows"] == 1.0 or algorithm == "rloo"


def test_rows_that_the_run_does_not_reach_are_not_checked(shop: Workshop) -> None:
    rows = [*PROMPTS, {"prompt": 7, "answer": "1"}]
    data = {"data": {"train": str(shop.rows("far.jsonl", rows)), "shuffle": False}}
    assert shop.train("rloo", "short", run={"steps": 3}, **data).code == 0


def test_roles_that_are_precomputed_wait_for_the_check(shop: Workshop) -> None:
    rows = [*PAIRS, {"prompt": "1+1=", "chosen": 7, "rejected": "3"}]
    data = {"train": str(shop.rows("wrong.jsonl", rows)), "shuffle": False}
    run: Finished = shop.run("dpo", "run", data=data, reference={"precompute": True}, run={"steps": 4})
    assert run.code == 1
    assert "wrong.jsonl, line 13: column 'chosen': must be text, got int" in run.said


class Slow(TrainData):
    """The first row waits until the test releases it."""

    gate = threading.Event()

    def judge(self, row, answered=False):
        self.gate.wait(60)
        return super().judge(row, answered)


@pytest.fixture
def data(shop: Workshop) -> TrainData:
    from rlhf_runtime.data.tokenizer import load_tokenizer

    path = shop.rows("rows.jsonl", [*PROMPTS, {"prompt": 7, "answer": "1"}])
    section = DataSection(train=(SourceSection(path=str(path)),), shuffle=False)
    return Slow(section, load_tokenizer(str(shop.model), False), "prompts", 0)


def test_the_check_reads_the_configured_number_of_rows(data: TrainData, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow.gate.set()
    for rows, wrong in ((12, False), (13, True), (10**9, True)):
        check = RowCheck(data, rows)
        check.start()
        if wrong:
            with pytest.raises(DataError, match=r"rows.jsonl, line 13: column 'prompt': must be text"):
                check.wait()
        else:
            check.wait()
    monkeypatch.setattr(dataset, "CHECKED", 12)
    check = RowCheck(data, 10**9)
    check.start()
    check.wait()
    assert (data.order.rows_taken, data.bad_rows) == (0, 0), "nothing was taken or counted"


def raised(check: RowCheck) -> str:
    with pytest.raises(DataError) as error:
        check.wait()
    return str(error.value)


def test_waiting_for_the_check_blocks_and_stopping_does_not(data: TrainData) -> None:
    Slow.gate.clear()
    check, refusals = RowCheck(data, 13), list[str]()
    check.start()
    waiting = threading.Thread(target=lambda: refusals.append(raised(check)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "the first row has not been checked"
    Slow.gate.set()
    waiting.join(60)
    assert "must be text" in refusals[0]
    Slow.gate.clear()
    check = RowCheck(data, 13)
    check.start()
    threading.Timer(0.2, Slow.gate.set).start()
    check.stop()
    check.wait()


LOSSES = {
    "pairs": ("grpo", "dpo", "the loss 'dpo' is for pairs, but this slot needs a loss for prompts, such as 'ppo'"),
    "both answers": ("dpo", "nll", "the loss 'nll' is for demonstrations, but this slot needs a loss for pairs"),
    "sampled pairs": ("online_dpo", "kto", "the loss 'kto' is for labels, but this slot needs a loss for pairs"),
    "scalar head": ("reward_model", "dpo", "the loss 'dpo' reads 'logprobs', which the 'scalar' head of 'policy'"),
    "language model": ("grpo", "value", "the loss 'value' reads 'values', which the 'lm' head of 'policy' does not"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_cannot_read_the_algorithms_batches(shop: Workshop, case: str) -> None:
    algorithm, loss, says = LOSSES[case]
    finished = shop.run(algorithm, "run", "--dry-run", algorithm={"loss": {"use": loss}})
    assert finished.code == 2, finished.said
    assert says in finished.err


@pytest.mark.parametrize(("algorithm", "loss"), [("online_dpo", "simpo"), ("rejection_sampling", "dft")])
def test_a_loss_for_the_same_form_of_data(shop: Workshop, algorithm: str, loss: str) -> None:
    assert shop.run(algorithm, "run", "--dry-run", algorithm={"loss": {"use": loss}}).code == 0
