"""Whole runs on labelled answers: they learn, give the numbers of the definition for any split, and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_testing.tiny import tiny_model

from tests.forks import Forks
from tests.runs import LABELS, PAIRS, Workshop, assert_same_run
from tests.test_resume import KILLER, Runs


def config(shop: Workshop, output: str, algo: str = "kto", **changes: Any) -> dict[str, Any]:
    """Twelve rows, all in each step."""
    rows = shop.rows(f"{algo}.jsonl", LABELS if algo == "kto" else PAIRS)
    run = shop.config("sft", output, **{"run": {"steps": 4}, "trainer": {"lr": 1e-2}, **changes})
    run["algorithm"] = {"use": algo, **changes.get("algorithm", {})}
    run["data"] = {"train": str(rows), "batch_size": 12, "max_tokens": 64, **changes.get("data", {})}
    return run


@pytest.mark.parametrize(("algo", "loss_type"), [("kto", "kto"), ("kto", "apo_zero_unpaired"), ("kto_pair", "vanilla")])
def test_kto_learns_from_labels(shop: Workshop, algo: str, loss_type: str) -> None:
    loss = {"loss_type": loss_type, "beta": 0.5}
    lines = shop.train_config(config(shop, "run", algo, algorithm={"loss": loss}, run={"steps": 16})).lines()
    first, last = lines[0], lines[-1]
    assert first["policy/loss"] == pytest.approx(0.5, abs=1e-6), "policy and reference are one model at first"
    assert first["policy/desirable_reward"] == first["policy/undesirable_reward"] == 0
    assert last["policy/loss"] < 0.4
    assert last["policy/desirable_reward"] > 0 > last["policy/undesirable_reward"]
    assert last["policy/accuracy"] > 0.9
    assert last["policy/desirable"] == pytest.approx(1 / 3 if algo == "kto" else 1 / 2)
    assert ("policy/kl" in last) == (loss_type != "apo_zero_unpaired")
    if loss_type == "kto":
        assert first["policy/kl"] == 0


def test_mismatched_answers_keep_to_the_longest_sequence_allowed(shop: Workshop) -> None:
    """Prompts have 3 and 9 tokens, answers 2 and 8 with their end. After the long prompt the long answer is cut."""
    rows = [
        {"prompt": prompt, "response": answer, "label": n % 2 == 0}
        for n, (prompt, answer) in enumerate([("1+1+1+1+=", "4"), ("1+=", "1234567"), ("2+=", "2"), ("3+=", "3")])
    ]
    run = config(shop, "run", data={"batch_size": 4, "max_tokens": 11})
    run["data"]["train"] = str(shop.rows("long.jsonl", rows))
    lines = shop.train_config(run).lines()
    # row 0 gets the answer of row 3, row 1 that of row 0, row 2 that of row 1 (3 + 8 tokens: it fits)
    assert all("labels/cut_twins" not in line for line in lines)
    run = config(shop, "cut", data={"batch_size": 4, "max_tokens": 11})
    run["data"]["train"] = str(shop.rows("longer.jsonl", [rows[1], rows[0], *rows[2:]]))
    lines = shop.train_config(run).lines()
    assert [line["labels/cut_twins"] for line in lines] == [1.0] * 4


def logprob(model: Any, ids: list[int], start: int) -> float:
    """Sum over the tokens from ``start`` on, by transformers, in one forward pass of this sequence alone."""
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return float(sum(logp[t - 1, ids[t]] for t in range(start, len(ids))))


def far_reference(shop: Workshop) -> Path:
    """A reference with lower log-probs than the policy for most answers, so that z is not 0."""
    return tiny_model(shop.folder / "other", hidden=16, heads=2, kv_heads=1, std=0.4)


def test_the_first_step_is_the_definition(shop: Workshop) -> None:
    """Compared with transformers, one sequence at a time. The reference is another model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = far_reference(shop)
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.75, "beta": 0.3}
    run = config(shop, "run", run={"steps": 1}, reference={"model": str(other)}, algorithm={"loss": weights})
    [line] = shop.train_config(run).lines()

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).eval() for p in (shop.model, other)
    )
    tokenizer = AutoTokenizer.from_pretrained(shop.model)
    ids = [(tokenizer(r["prompt"])["input_ids"], [*tokenizer(r["response"])["input_ids"], 1]) for r in LABELS]

    def h(prompt: list[int], answer: list[int]) -> float:
        """<eos> (id 1) ends an answer."""
        return logprob(policy, prompt + answer, len(prompt)) - logprob(reference, prompt + answer, len(prompt))

    drift = []
    for i, (prompt, _) in enumerate(ids):
        j = next(j for j in (*range(i - 1, -1, -1), *range(len(ids) - 1, i, -1)) if ids[j][0] != prompt)
        drift.append(h(prompt, ids[j][1]))
    z = max(0.0, sum(drift) / len(drift))
    log_ratios = torch.tensor([h(*pair) for pair in ids], dtype=torch.float64)
    label = torch.tensor([r["label"] for r in LABELS])
    loss = torch.where(
        label, 1.5 * (1 - torch.sigmoid(0.3 * (log_ratios - z))), 0.75 * (1 - torch.sigmoid(0.3 * (z - log_ratios)))
    )
    assert z > 0, "this reference lies below the policy on mismatched answers"
    assert line["policy/kl"] == pytest.approx(z, rel=1e-5)
    assert line["policy/loss"] == pytest.approx(float(loss.mean()), rel=1e-5)
    assert line["policy/desirable_reward"] == pytest.approx(0.3 * float(log_ratios[label].mean()), rel=1e-4)
    assert line["policy/undesirable_reward"] == pytest.approx(0.3 * float(log_ratios[~label].mean()), rel=1e-4)


@pytest.mark.parametrize("loss_type", ["kto", "vanilla"])
def test_micro_batches_change_nothing(shop: Workshop, loss_type: str) -> None:
    settings = {"algorithm": {"loss": {"loss_type": loss_type}}, "reference": {"model": str(far_reference(shop))}}
    full = shop.train_config(config(shop, "whole", **settings)).lines()
    few = {"micro_tokens": 10}
    split = shop.train_config(config(shop, "split", **settings, policy=few)).lines()
    assert all(line["policy/kl"] > 1 for line in full)
    for first, second in zip(full, split, strict=True):
        assert first["policy/loss"] == pytest.approx(second["policy/loss"], rel=1e-4)
        assert first["policy/kl"] == pytest.approx(second["policy/kl"], rel=1e-3, abs=1e-5)


def test_held_out_rows_are_evaluated_from_two_on(shop: Workshop) -> None:
    """One held-out row has no mismatched answer."""
    rows = [{"path": str(shop.rows("held_out.jsonl", LABELS[1:5])), "name": "held_out"}]
    held_out = {"data": {"eval": rows}, "run": {"steps": 2}}
    [_, last] = shop.train_config(config(shop, "run", eval={"every": 2}, **held_out)).lines()
    assert {"eval/loss", "eval/kl", "eval/accuracy", "eval/desirable"} <= set(last)
    refused = shop.run_config(config(shop, "one", eval={"every": 2, "max_rows": 1}, **held_out))
    assert refused.code == 2
    assert "kto needs at least 2 rows to evaluate on, got 1 from data.eval" in refused.said


def test_the_reference_is_precomputed_only_where_it_can_be(shop: Workshop) -> None:
    precompute = {"reference": {"precompute": True}}
    refused = shop.run_config(config(shop, "run", **precompute))
    assert refused.code == 2
    assert "'twin_ref_logprobs' on combinations of rows" in refused.said
    apo = {"algorithm": {"loss": {"loss_type": "apo_zero_unpaired"}}}
    along, cached = (
        shop.train_config(config(shop, name, **apo, **reference)).lines()
        for name, reference in (("a", {}), ("b", precompute))
    )
    for first, second in zip(along, cached, strict=True):
        assert first["policy/loss"] == pytest.approx(second["policy/loss"], rel=1e-5)


def test_adapters_take_their_base_as_reference(shop: Workshop) -> None:
    """Undesirable answers have weight 0, so that the log-probs of all answers rise."""
    raise_all = {"loss": {"undesirable_weight": 0.0}}
    adapters = {"trainer": {"lora": {"rank": 4}, "lr": 1e-2}, "algorithm": raise_all}
    base_view = shop.train_config(config(shop, "base", **adapters)).lines()
    second_model = shop.train_config(config(shop, "second", placement={"reference": {}}, **adapters)).lines()
    assert base_view[-1]["policy/kl"] > 0
    for first, second in zip(base_view, second_model, strict=True):
        assert first["policy/loss"] == pytest.approx(second["policy/loss"], rel=1e-5)
        assert first["policy/kl"] == pytest.approx(second["policy/kl"], rel=1e-3, abs=1e-5)


@pytest.mark.full  # the algorithm has no state, and test_resume.py kills runs on rows
def test_a_killed_run_resumes_exactly(forks: Forks, shop: Workshop) -> None:
    runs = Runs(forks, shop)
    settings = {
        "run": {"steps": 5},
        "checkpoint": {"every": 2},
        "data": {"batch_size": 5, "shuffle": True},
        "observer": [{"use": f"file:{shop.file('killer.py', KILLER)}"}],
    }
    baseline = runs.end(config(shop, "whole", **settings))
    assert baseline.code == 0, baseline.err
    broken = config(shop, "broken", **settings)
    runs.die_at(broken, "step 4")
    assert_same_run(runs.resume(broken), baseline)
