"""Process reward models, and their credit in reinforcement learning at the tokens that end the policy's steps."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_algorithms import pipeline
from rlhf_testing.tiny import tiny_model

from tests.runs import Finished, Workshop

SOLUTIONS = [
    {"prompt": f"{a}+{b}=", "completions": [f"{a}+{b}", str(a + b), "x"], "labels": [True, 0.75, False]}
    for a in range(3)
    for b in range(3)
]
CHARS = "0123456789+=x-\n"
"""A small vocabulary, so that an untrained policy often ends a line."""
OFFLINE = {"sampling": None, "reward": None}
LONG = {"max_new_tokens": 24, "ignore_eos": True}
LABELS = {"head": "lm", "label_tokens": ["+", "-"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), hidden=16, heads=2, kv_heads=1, chars=CHARS)


def train(shop: Workshop, model: Path, output: str, algorithm: dict[str, Any], **changes: Any) -> Finished:
    steps = shop.rows("steps.jsonl", SOLUTIONS)
    data = {"train": str(steps), "batch_size": 3, "eval": [{"path": str(steps), "name": "held_out"}]}
    settings = {"algorithm": algorithm, "data": data, "policy": {"model": str(model)}, "trainer": {"lr": 5e-3}}
    return shop.train("prm", output, **{**OFFLINE, **settings, **changes})


@pytest.fixture(scope="module")
def trained(tiny: Workshop, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    shop = Workshop(tmp_path_factory.mktemp("prm"), model, tiny.data)
    return {
        "classes": train(shop, model, "classes", {}, run={"steps": 6}),
        "lm": train(shop, model, "lm", LABELS, run={"steps": 6}),
    }


@functools.cache
def loaded(path: Path) -> tuple[Any, list[int]]:
    """(transformers' model with outputs at every token, which of them are right and wrong)."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    config = json.loads((path / "config.json").read_text())
    if "right_token_id" in config:
        return AutoModelForCausalLM.from_pretrained(path), [config["right_token_id"], config["wrong_token_id"]]
    return AutoModelForTokenClassification.from_pretrained(path), [1, 0]


def probabilities(path: Path, ids: list[int]) -> torch.Tensor:
    """[tokens]: probability, computed by transformers, that a step that ends there is right."""
    module, outputs = loaded(path)
    with torch.no_grad():
        return torch.softmax(module(torch.tensor([ids])).logits[0][:, outputs], 1)[:, 0]


@functools.cache
def tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def ends(path: Path, ids: Iterable[int]) -> list[int]:
    """The ends of lines that are not blank; each token is one character."""
    positions, line = [], ""
    for i, token in enumerate(ids):
        c = tokenizer(path).decode([token])
        if c == "\n" and line.strip():
            positions.append(i)
        line = "" if c == "\n" else line + c
    return positions


# ---------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("kind", ["classes", "lm"])
def test_transformers_gives_the_step_scores_that_the_run_reported(trained: dict[str, Finished], kind: str) -> None:
    path, last = trained[kind].path / "model", trained[kind].lines()[-1]
    encode = tokenizer(path)
    losses, verdicts, scores, labels = [], [], [], []
    for row in SOLUTIONS:
        ids = encode(row["prompt"] + "".join(f"{step}\n" for step in row["completions"]))["input_ids"]
        step_scores = probabilities(path, ids)[ends(path, ids)]
        p = torch.tensor([float(label) for label in row["labels"]])
        losses += (-p * step_scores.log() - (1 - p) * (1 - step_scores).log()).tolist()
        verdicts += ((step_scores >= 0.5) == (p >= 0.5)).tolist()
        scores += step_scores.tolist()
        labels += p.tolist()
    assert len(losses) == 3 * len(SOLUTIONS)
    right = [s for s, label in zip(verdicts, labels, strict=True) if label >= 0.5]
    wrong = [s for s, label in zip(verdicts, labels, strict=True) if label < 0.5]
    assert last["eval/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert last["eval/accuracy"] == pytest.approx(sum(verdicts) / len(verdicts))
    assert last["eval/accuracy_right"] == pytest.approx(sum(right) / len(right))
    assert last["eval/accuracy_wrong"] == pytest.approx(sum(wrong) / len(wrong))
    assert last["eval/probability"] == pytest.approx(sum(scores) / len(scores), rel=1e-4)


@pytest.mark.parametrize("kind", ["classes", "lm"])
def test_rlhf_eval_gives_the_metrics_that_the_run_reported(
    trained: dict[str, Finished], tmp_path: Path, kind: str
) -> None:
    rows, right = tmp_path / "rows.jsonl", {**SOLUTIONS[0], "labels": [True] * 3}
    rows.write_text("".join(json.dumps(row) + "\n" for row in [*SOLUTIONS, {**right, "labels": [1]}]))
    shop = Workshop(tmp_path, trained[kind].path / "model", rows)
    words = ["--algo", "prm", "--model", str(shop.model), "--data", str(rows), "--data.bad_rows", "drop"]
    words += ["--policy.dtype", "fp32"]  # as in the run, also on processors for which bf16 is chosen
    words += ["--algorithm.head", "lm", "--algorithm.label_tokens", '["+", "-"]'] if kind == "lm" else []
    metrics = json.loads(shop.command("eval", *words, "--json").out)
    reported = {name[5:]: value for name, value in trained[kind].lines()[-1].items() if name.startswith("eval/")}
    assert metrics == pytest.approx(reported | {"left_out": 1.0})
    rows.write_text("".join(json.dumps(row) + "\n" for row in [*SOLUTIONS, right]))
    assert {"solution_accuracy_right", "solution_f1"} <= json.loads(shop.command("eval", *words, "--json").out).keys()


@pytest.mark.parametrize("kind", ["classes", "lm"])
def test_it_learns(trained: dict[str, Finished], kind: str) -> None:
    losses = [line["policy/loss"] for line in trained[kind].lines()]
    assert losses[-1] < 0.9 * losses[0]


def test_transformers_loads_the_export_of_two_classes_without_a_new_weight(trained: dict[str, Finished]) -> None:
    from transformers import AutoModelForTokenClassification

    path = trained["classes"].path / "model"
    module, info = AutoModelForTokenClassification.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    assert module.config.architectures == [type(module).__name__]
    assert not module.score.bias.any()


def test_the_export_of_two_classes_names_them(trained: dict[str, Finished]) -> None:
    from transformers import AutoModelForSequenceClassification

    path = trained["classes"].path / "model"
    module = AutoModelForSequenceClassification.from_pretrained(path)
    assert module.config.id2label == {0: "wrong", 1: "right"}
    text = "1+2=1+2\n"
    with torch.no_grad():
        probability = module(**tokenizer(path)(text, return_tensors="pt")).logits.softmax(1)[0, 1]
    assert float(probability) == pytest.approx(
        float(probabilities(path, tokenizer(path)(text)["input_ids"])[-1]), rel=1e-4
    )


def test_training_continues_from_either_export(shop: Workshop, trained: dict[str, Finished]) -> None:
    for kind, algorithm in (("classes", {}), ("lm", LABELS)):
        continuation = train(
            shop, trained[kind].path / "model", kind, algorithm, run={"steps": 1}, eval={"at_start": True}
        )
        first = continuation.lines()[0]
        assert first["step"] == 0
        assert first["eval/loss"] == pytest.approx(trained[kind].lines()[-1]["eval/loss"], rel=1e-4)


def test_an_evaluation_gives_processbenchs_f1(shop: Workshop, trained: dict[str, Finished]) -> None:
    """On rows as Qwen/ProcessBench has them; the model's predictions are those of transformers."""
    path = trained["classes"].path / "model"
    rows, matches = list[dict[str, Any]](), {True: list[bool](), False: list[bool]()}
    for number, row in enumerate(SOLUTIONS):
        steps = row["completions"]
        ids = tokenizer(path)(row["prompt"] + "".join(f"{step}\n" for step in steps))["input_ids"]
        wrong_steps = (probabilities(path, ids)[ends(path, ids)] < 0.5).nonzero()[:, 0].tolist()
        prediction = wrong_steps[0] if wrong_steps else -1
        label = (prediction, -1, 1)[number % 3]
        matches[label != -1].append(prediction == label)
        columns = {"id": f"gsm8k-{number}", "generator": "m", "problem": row["prompt"], "steps": steps}
        rows.append({**columns, "final_answer_correct": label == -1, "label": label})
    wrong, right = (sum(m) / len(m) for m in (matches[True], matches[False]))
    assert wrong + right > 0
    bench = {"path": str(shop.rows("bench.jsonl", rows)), "name": "bench"}
    data = {"train": str(shop.rows("steps.jsonl", SOLUTIONS)), "batch_size": 3, "eval": [bench]}
    run = train(shop, path, "bench", {}, run={"steps": 1}, data=data, eval={"at_start": True, "metric": "solution_f1"})
    line = run.lines()[0]
    assert line["eval/solution_accuracy_wrong"] == pytest.approx(wrong)
    assert line["eval/solution_accuracy_right"] == pytest.approx(right)
    assert line["eval/solution_f1"] == pytest.approx(2 * wrong * right / (wrong + right))


def test_a_label_of_several_tokens_is_refused_before_a_model_is_loaded(shop: Workshop, model: Path) -> None:
    (model_without_weights := shop.folder / "empty").mkdir()
    for file in model.iterdir():
        if not file.name.endswith(".safetensors"):
            (model_without_weights / file.name).write_bytes(file.read_bytes())
    data = {"train": str(shop.rows("steps.jsonl", SOLUTIONS)), "batch_size": 3}
    run = shop.run(
        "prm",
        "run",
        **OFFLINE,
        algorithm={"head": "lm", "label_tokens": ["++", "-"]},
        data=data,
        policy={"model": str(model_without_weights)},
    )
    assert run.code == 2
    assert "algorithm.label_tokens: '++' must be one token of the policy's tokenizer, but is 2" in run.said


# --------------------------------------------------------------------------------------- as a reward


class Credits:
    """The results of :func:`rlhf_algorithms.pipeline.credit` for every batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[Any] = []
        original = pipeline.credit

        def credit(*arguments: Any, **options: Any) -> Any:
            batch, metrics = original(*arguments, **options)
            self.batches.append(batch)
            return batch, metrics

        monkeypatch.setattr(pipeline, "credit", credit)


@pytest.mark.parametrize(("algorithm", "kind"), [("ppo", "lm"), ("reinforce_pp", "classes")])
def test_each_step_is_credited_at_the_token_that_ends_it(
    shop: Workshop,
    model: Path,
    trained: dict[str, Finished],
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    kind: str,
) -> None:
    """Token rewards equal transformers' probabilities at the steps that are found in decoded text. The credit of gae
    (lambda 1) and reinforce is the return from each token on."""
    credits, path = Credits(monkeypatch), trained[kind].path / "model"
    reward = [{"use": "prm", "model": str(path), "credit": "step", "weight": 0.5, "without_steps": "last_token"}]
    run = shop.train(
        algorithm,
        "run",
        run={"steps": 1},
        policy={"model": str(model)},
        reward=reward,
        sampling=LONG,
    )
    (batch,) = credits.batches
    assert batch.units == len(list(run.samples())) == 12
    steps, expected = 0, torch.zeros(batch.tokens)
    for u in range(batch.units):
        unit = batch.select([u])
        start = int((batch.unit_N < u).sum())
        sampled = unit.tok["loss_mask"].nonzero()[:, 0].tolist()
        positions = [sampled[i] for i in ends(path, unit.ids_N[sampled].tolist())]
        steps += len(positions)
        p_N = probabilities(path, unit.ids_N.tolist())
        for position in positions or sampled[-1:]:
            expected[start + position] = 0.5 * p_N[position]
    assert steps > 6
    assert torch.allclose(batch.tok["step_reward"], expected, rtol=1e-4, atol=1e-6)
    assert not batch.unit["reward"].any(), "nothing is left for the end"
    to_go = torch.cat([expected[batch.unit_N == u].flip(0).cumsum(0).flip(0) for u in range(batch.units)])
    mask_N = batch.tok["loss_mask"]
    if algorithm == "ppo":
        assert torch.allclose(batch.tok["returns"][mask_N], to_go[mask_N], rtol=1e-4, atol=1e-5)
    raw_A = to_go - batch.tok["old_values"] if algorithm == "ppo" else to_go
    raw_A = raw_A[mask_N]
    whitened_A = (raw_A - raw_A.mean()) / raw_A.std(correction=0)
    assert torch.allclose(batch.tok["advantages"][mask_N], whitened_A, rtol=1e-3, atol=1e-4)
    assert run.lines()[0]["reward/steps"] == pytest.approx(float(expected.sum()) / 12, rel=1e-4)


def test_the_aggregate_is_an_answers_value(shop: Workshop, model: Path, trained: dict[str, Finished]) -> None:
    path = trained["classes"].path / "model"
    reward = [{"use": "prm", "model": str(path), "aggregate": "product"}]
    run = shop.train("rloo", "run", run={"steps": 1}, policy={"model": str(model)}, reward=reward, sampling=LONG)
    samples = list(run.samples())
    for sample in samples:
        prompt, answer = sample["turns"]
        positions = [len(prompt["ids"]) + i for i in ends(path, answer["ids"])]
        assert positions, "an answer without a step has no value, and nothing else gives it one: it is left out"
        scores = probabilities(path, prompt["ids"] + answer["ids"])[positions]
        assert sample["rewards"]["prm"]["steps"] == []
        assert sample["reward"] == pytest.approx(float(scores.prod()), rel=1e-3)
    assert 0 < len(samples) < 12


def test_the_export_records_the_step_separator_and_the_reward_uses_it(shop: Workshop, model: Path) -> None:
    steps = str(shop.rows("steps.jsonl", SOLUTIONS))
    data = {"train": steps, "batch_size": 3, "eval": [], "step_separator": "-"}
    path = train(shop, model, "dashes", {}, run={"steps": 1}, data=data).path / "model"
    assert json.loads((path / "config.json").read_text())["step_separator"] == "-"
    reward = {"use": "prm", "model": str(path), "aggregate": "sum", "without_steps": "last_token"}
    changes = {"run": {"steps": 1}, "policy": {"model": str(model)}, "sampling": LONG}
    total = 0
    for sample in shop.train("rloo", "run", reward=[reward], **changes).samples():
        answer = sample["turns"][1]
        texts = answer["text"].split("-")[:-1]  # a dash behind nothing but white space ends no step
        total += (count := sum(bool(text.strip()) for text in texts))
        assert len(sample["rewards"]["prm"]["info"]["probabilities"]) == (count or 1)
    assert total > 6
    refused = shop.run("rloo", "other", reward=[{**reward, "separator": "\n"}], **changes)
    assert refused.code == 2
    assert "steps that end with '-' (step_separator in its config.json)" in refused.said


def test_a_token_classification_model_is_read_with_its_bias(shop: Workshop, model: Path) -> None:
    from transformers import AutoConfig, AutoModelForTokenClassification

    path = shop.folder / "tokens"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        plain = AutoModelForTokenClassification.from_config(AutoConfig.from_pretrained(model, num_labels=2)).eval()
    with torch.no_grad():
        plain.score.bias.copy_(torch.tensor([0.0, 4.0]))
    plain.save_pretrained(path)
    tokenizer(model).save_pretrained(path)
    reward = [{"use": "prm", "model": str(path), "without_steps": "last_token"}]
    run = shop.train("rloo", "run", run={"steps": 1}, policy={"model": str(model)}, reward=reward)
    for sample in run.samples():
        ids = [i for turn in sample["turns"] for i in turn["ids"]]
        scores = probabilities(path, ids)
        positions = [len(sample["turns"][0]["ids"]) + i for i in ends(path, sample["turns"][1]["ids"])]
        assert sample["reward"] == pytest.approx(float(scores[positions or [-1]].min()), rel=1e-3)


def test_evaluations_report_the_aggregate_beside_the_reward(
    shop: Workshop, model: Path, trained: dict[str, Finished]
) -> None:
    """With credit at tokens the reward of an answer is 0. The run must not report that nothing was learnt, nor choose
    its best step by these rewards."""
    path = trained["classes"].path / "model"
    reward = [{"use": "prm", "model": str(path), "credit": "step", "without_steps": "last_token"}]
    data = {"eval": [{"path": str(shop.data), "name": "held_out", "max_rows": 3}]}
    run = shop.train("rloo", "run", run={"steps": 1}, policy={"model": str(model)}, reward=reward, data=data)
    (line,) = run.lines()
    assert line["eval/reward"] == 0.0
    assert 0 < line["eval/score"] < 1
    best = json.loads((run.path / "checkpoints" / "best.json").read_text())
    assert (best["metric"], best["value"]) == ("eval/score", line["eval/score"])


def test_an_outcome_reward_model_that_starts_from_a_process_reward_model_has_no_separator(
    shop: Workshop, trained: dict[str, Finished]
) -> None:
    """With one, the reward ``model`` would refuse it as a process reward model."""
    start = trained["lm"].path / "model"
    assert "step_separator" in json.loads((start / "config.json").read_text())
    run = shop.train("reward_model", "outcome", run={"steps": 1}, policy={"model": str(start)}, **OFFLINE)
    assert "step_separator" not in json.loads((run.path / "model" / "config.json").read_text())
