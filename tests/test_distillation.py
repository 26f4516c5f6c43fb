"""Whole runs of distillation: the student approaches its teacher, on given answers and on its own. Refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_testing.tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runs import PROMPTS, Finished, Workshop, assert_same_run, merged
from tests.test_first_step import close, norm
from tests.test_resume import Runs, config
from tests.test_teachers import CONTEXT

ONLINE, OFFLINE = "distill_on_policy", "distill"

MIXED = {"algorithm": {"sampled": 0.5}}
AVERAGED = {"roles": None, "algorithm": {"teacher": {"weights": "averaged", "share": 0.5}, "loss": {"top_k": 5}}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model twice as wide as the student, with an untied head."""
    return tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=5, std=0.1, tied=False)


def changes(algorithm: str, teacher: Path, **settings: Any) -> dict[str, Any]:
    """The options of distillation: a teacher, and no reward."""
    base: dict[str, Any] = {"reward": None, "roles": {"teacher": {"model": str(teacher), "dtype": "fp32"}}, **settings}
    return base if algorithm == ONLINE else {"sampling": None, **base}


def test_the_student_nears_its_teacher_on_demonstrations(shop: Workshop, teacher: Path) -> None:
    run = shop.train(
        OFFLINE,
        "run",
        **changes(OFFLINE, teacher),
        run={"steps": 12},
        algorithm={"loss": {"divergence": "jsd", "alpha": 1.0}},
        trainer={"lr": 1e-2},
        data={"eval": [{"path": str(shop.data), "name": "held_out"}]},
        eval={"every": 12, "at_start": True},
    )
    lines = run.lines()
    first, last = lines[0]["eval/divergence"], lines[-1]["eval/divergence"]
    assert last < 0.8 * first
    assert lines[-1]["eval/agreement"] > lines[0]["eval/agreement"]
    assert all(math.isfinite(value) for line in lines for value in line.values())


def test_alpha_weights_the_data_and_the_teacher(shop: Workshop, teacher: Path) -> None:
    run = shop.train(OFFLINE, "run", **changes(OFFLINE, teacher), algorithm={"loss": {"alpha": 0.9}})
    for line in run.lines():
        mixed = 0.1 * line["policy/nll"] + 0.9 * line["policy/divergence"]
        assert line["policy/loss"] == pytest.approx(mixed, rel=1e-5)


def test_the_student_nears_its_teacher_on_its_own_answers(shop: Workshop, teacher: Path) -> None:
    """No reward scores the answers. They are sampled at a higher temperature than the models are compared at."""
    run = shop.train(
        ONLINE,
        "run",
        **changes(ONLINE, teacher),
        run={"steps": 12},
        trainer={"lr": 1e-2},
        sampling={"temperature": 1.3},
    )
    lines = run.lines()
    assert len(list(run.samples())) == 12 * 4 * 3
    first, last = (sum(line["policy/divergence"] for line in part) for part in (lines[:3], lines[-3:]))
    assert last < 0.8 * first
    assert all(line["policy/loss"] == pytest.approx(line["policy/divergence"]) for line in lines)
    assert 0 < lines[0]["length/mean"] <= 6


@pytest.mark.parametrize("task", [True, False])
def test_the_student_nears_a_teacher_that_scores_its_tokens(shop: Workshop, teacher: Path, task: bool) -> None:
    """Added to the credit of a reward, and alone. ``teacher/kl`` is an estimate from few samples."""
    run = shop.train(
        "grpo" if task else "reinforce_pp",
        "run",
        roles={"teacher": {"model": str(teacher), "dtype": "fp32"}},
        algorithm={"teacher": {"coef": 1.0, "task": task}},
        run={"steps": 16},
        trainer={"lr": 1e-2},
        **({} if task else {"reward": None}),
    )
    lines = run.lines()
    first, last = (sum(line["teacher/kl"] for line in part) for part in (lines[:4], lines[-4:]))
    assert last < (0.95 if task else 0.7) * first
    assert ("reward/mean" in lines[0]) == task


def test_given_and_sampled_answers_are_mixed(shop: Workshop, teacher: Path) -> None:
    """Six steps of four rows with two samples each. For some rows the answers are those of the data."""
    run = shop.train(
        ONLINE,
        "run",
        **changes(ONLINE, teacher),
        run={"steps": 6},
        algorithm={"sampled": 0.5},
        sampling={"samples_per_prompt": 2},
    )
    groups: dict[int, list[dict[str, Any]]] = {}
    for sample in run.samples():
        groups.setdefault(sample["group"], []).append(sample)
    demonstrations = [members for members in groups.values() if members[0]["turns"][1]["is_demonstration"]]
    assert len(groups) == 24
    assert 4 <= len(demonstrations) <= 20
    assert all(len(members) == 1 for members in demonstrations)
    rows = [json.loads(line) for line in shop.data.read_text().splitlines()]
    for [sample] in demonstrations:
        row = rows[sample["row"]["index"]]
        assert [turn["text"] for turn in sample["turns"]] == [row["prompt"], row["response"]]
    assert all(len(members) == 2 for members in groups.values() if members not in demonstrations)
    assert sum(line["stream/demonstrations"] for line in run.lines()) == len(demonstrations)
    tokens = [len(s["turns"][1]["ids"]) for m in groups.values() if m not in demonstrations for s in m]
    assert max(line.get("length/max", 0) for line in run.lines()) == max(tokens)


def test_mixing_needs_answers_and_no_environment(shop: Workshop, teacher: Path) -> None:
    prompts = shop.rows("prompts.jsonl", [{"prompt": "1+1="}])
    settings = changes(ONLINE, teacher) | MIXED
    run = shop.run(ONLINE, "run", **settings, data={"train": str(prompts)})
    refused(run, "has no column 'response'", "learns from the answers of some rows", code=1)
    run = shop.run(ONLINE, "run", **settings, env={"use": "number_game"}, rollout={"use": "multi_turn"})
    refused(run, "learns from the answers of a share of 0.5 of the rows", "env 'number_game' is set")
    assert not (shop.folder / "run").exists()


def test_a_reward_is_reported_and_filters_but_gives_no_gradient(shop: Workshop, teacher: Path) -> None:
    teacher_role = {"roles": {"teacher": {"model": str(teacher), "dtype": "fp32"}}}
    baseline = shop.train(ONLINE, "alone", **changes(ONLINE, teacher))
    reward_run = shop.train(ONLINE, "beside", **teacher_role)
    assert baseline.weights == reward_run.weights
    assert {sample["reward"] for sample in baseline.samples()} == {None}
    assert None not in {sample["reward"] for sample in reward_run.samples()}
    filtered = shop.train(ONLINE, "filtered", **teacher_role, stream={"filter": {"min_std": 0.01}})
    assert filtered.weights != baseline.weights


def test_hidden_states_in_bf16_are_nearly_those_in_fp32(shop: Workshop, teacher: Path) -> None:
    fp32 = shop.train(OFFLINE, "fp32", **changes(OFFLINE, teacher)).lines()
    bf16 = shop.train(OFFLINE, "bf16", **changes(OFFLINE, teacher), algorithm={"hidden": "bf16"}).lines()
    for first, second in zip(fp32, bf16, strict=True):
        assert first["policy/divergence"] != second["policy/divergence"]
        assert second["policy/divergence"] == pytest.approx(first["policy/divergence"], rel=2e-2)


@pytest.mark.parametrize(
    ("algorithm", "staleness", "extra_options"),
    [
        pytest.param(OFFLINE, 0, {}, marks=pytest.mark.full),
        pytest.param(ONLINE, 0, {}, marks=pytest.mark.full),
        (ONLINE, 2, MIXED),
        (ONLINE, 0, AVERAGED),
    ],
)
def test_a_killed_and_resumed_distillation_ends_with_equal_weights(
    forks: Any, shop: Workshop, teacher: Path, algorithm: str, staleness: int, extra_options: dict[str, Any]
) -> None:
    runs = Runs(forks, shop)
    baseline, broken = (
        config(shop, algorithm, name, staleness, **{**changes(algorithm, teacher), **extra_options})
        for name in ("whole", "broken")
    )
    reference = runs.start(baseline)
    runs.die_at(broken, "step 4")
    finished, expected = runs.resume(broken), runs.result(baseline, reference)
    assert expected.code == 0, expected.err
    assert_same_run(finished, expected)


# ------------------------------------------------------------------------------------------ the student as the teacher


def self_taught(shop: Workshop, loss: dict[str, Any], rows: list[dict[str, Any]] = CONTEXT, **teacher: Any) -> Any:
    """The options of a student that is its own teacher, which reads a text that the student does not see."""
    options = merged({"context": "privileged_context", "template": "Hint: {context}"}, teacher)
    data = {"train": str(shop.rows("context.jsonl", rows))}
    return {"reward": None, "data": data, "algorithm": {"teacher": options, "loss": loss}}


@pytest.mark.parametrize(
    ("weights", "loss"),
    [
        ("base", {"divergence": "forward_kl"}),
        ("base", {"divergence": "jsd", "beta": 0.3, "top_k": 7}),
        ("live", {"divergence": "jsd", "beta": 0.3, "top_k": 7, "temperature": 0.8}),
        ("averaged", {"divergence": "reverse_kl", "top_k": 500}),
        ("role", {"divergence": "reverse_kl", "reduce": "seq_mean_token_mean"}),
    ],
)
def test_the_first_step_of_a_student_that_is_its_teacher(shop: Workshop, weights: str, loss: dict[str, Any]) -> None:
    """Again from the recorded samples with whole logits in fp64, one sequence at a time."""
    policy = tiny_model(shop.folder / "policy", seed=2, std=0.2)
    settings = self_taught(shop, loss, weights=weights)
    settings["policy"] = {"model": str(policy), "micro_tokens": 40}
    if weights == "role":
        settings["roles"] = {"teacher": {"model": str(policy), "dtype": "fp32"}}
    run = shop.train(ONLINE, "run", **settings, sampling={"temperature": 1.3})
    tokenizer = AutoTokenizer.from_pretrained(policy)
    student = AutoModelForCausalLM.from_pretrained(policy).double().eval()
    k, beta, temperature = loss.get("top_k", 10**6), loss.get("beta", 0.5), loss.get("temperature", 1.0)
    tokens, sequences = [], []
    for sample in run.samples_of(min(run.rollouts())):
        row = CONTEXT[sample["row"]["index"]]
        prompt, answer = (turn["ids"] for turn in sample["turns"])
        text = f"{row['prompt']}\n\nHint: {row['privileged_context']}"
        taught = tokenizer(text, add_special_tokens=False)["input_ids"]
        q = student(torch.tensor([[*prompt, *answer]])).logits[0, -len(answer) - 1 : -1]
        p = student(torch.tensor([[*taught, *answer]])).logits[0, -len(answer) - 1 : -1].detach()
        order = p.argsort(1, descending=True)[:, :k]
        p, q = ((values / temperature).softmax(1).gather(1, order) for values in (p, q))
        if k < order.shape[1] + 1:
            p, q = (torch.cat([values, 1 - values.sum(1, keepdim=True)], 1) for values in (p, q))
        m = beta * p + (1 - beta) * q
        d = {
            "forward_kl": (p * (p / q).log()).sum(1),
            "reverse_kl": (q * (q / p).log()).sum(1),
            "jsd": beta * (p * (p / m).log()).sum(1) + (1 - beta) * (q * (q / m).log()).sum(1),
        }[loss["divergence"]]
        tokens.append(d)
        sequences.append(d.mean())
    total = torch.stack(sequences).mean() if "reduce" in loss else torch.cat(tokens).mean()
    total.backward()
    first, *later_lines = run.lines()
    assert first["policy/loss"] == close(float(total.detach()))
    assert first["policy/divergence"] == close(float(torch.cat(tokens).detach().mean()))
    assert first["policy/grad_norm"] == close(norm(student))
    assert first["teacher/left_out"] == 0
    assert all(line["policy/grad_norm"] > 0 for line in later_lines)


def test_the_student_learns_what_only_its_teacher_reads(shop: Workshop) -> None:
    policy = tiny_model(shop.folder / "policy", seed=2, std=0.2)
    settings = self_taught(shop, {"top_k": 20, "divergence": "jsd"}, weights="live")
    run = shop.train(ONLINE, "run", **settings, policy={"model": str(policy)}, run={"steps": 12}, trainer={"lr": 1e-2})
    first, last = (sum(line["policy/divergence"] for line in part) for part in (run.lines()[:3], run.lines()[-3:]))
    assert last < 0.8 * first


def test_the_weights_of_a_self_teacher(shop: Workshop) -> None:
    """They are equal in the first step. Afterwards the average with the whole share is the student."""
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "live": ({"weights": "live"}, {}),
        "student": ({"weights": "averaged", "share": 1.0}, {}),
        "averaged": ({"weights": "averaged", "share": 0.05}, {}),
        "base": ({"weights": "base"}, {}),
        "base of adapters": ({"weights": "base"}, {"lora": {"rank": 4}}),
    }
    lines: dict[str, list[float]] = {}
    for name, (options, trainer) in cases.items():
        run = shop.train(ONLINE, name, **self_taught(shop, {"top_k": 20}, **options), trainer={"lr": 1e-2, **trainer})
        lines[name] = [line["policy/divergence"] for line in run.lines()]
    assert lines.pop("student") == pytest.approx(lines["live"], rel=1e-5)
    assert len({round(values[0], 6) for values in lines.values()}) == 1
    assert len({round(values[-1], 6) for values in lines.values()}) == 4


def test_samples_that_a_teacher_does_not_read_are_left_out(shop: Workshop) -> None:
    rows = [{**row, "privileged_context": "" if n % 2 else "It is so."} for n, row in enumerate(CONTEXT)]
    run = shop.train(ONLINE, "some", **self_taught(shop, {"top_k": 5}, rows, weights="live"))
    assert sum(line["teacher/left_out"] for line in run.lines()) == pytest.approx(1.5)  # 12 rows in three steps
    rows = [{**row, "privileged_context": "so " * 40} for row in CONTEXT]
    none = shop.run(ONLINE, "none", **self_taught(shop, {"top_k": 5}, rows, weights="live"))
    assert [line["teacher/left_out"] for line in none.lines()] == [1.0] * 3
    assert not any("policy/loss" in line for line in none.lines())
    assert (none.code, "nothing to learn" in none.said) == (1, True), none.said


def test_answers_of_the_data_have_a_teacher_with_a_context_too(shop: Workshop) -> None:
    settings = merged(self_taught(shop, {"top_k": 5}, weights="live"), MIXED)
    lines = shop.train(ONLINE, "run", **settings).lines()
    assert sum(line["stream/demonstrations"] for line in lines) > 0
    assert all(line["teacher/left_out"] == 0 for line in lines)


# ------------------------------------------------------------------------------------------------ refused


def test_self_teachers_that_do_not_fit_are_refused(shop: Workshop) -> None:
    run = shop.run(ONLINE, "run", **self_taught(shop, {"top_k": 5}, PROMPTS, weights="live"))
    refused(run, "no column 'privileged_context'")
    game = {"env": {"use": "number_game"}, "rollout": {"use": "multi_turn"}}
    run = shop.run(ONLINE, "run", **self_taught(shop, {}, weights="base"), **game)
    refused(run, "an environment writes the prompts")


def refused(run: Finished, *texts: str, code: int = 2) -> None:
    assert run.code == code, run.said
    for text in texts:
        assert text in run.err, run.err


def test_a_teacher_with_another_tokenizer_is_refused(shop: Workshop, tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path / "other", chars="abc0123456789+= ")
    other = tiny_model(tmp_path / "other")
    run = shop.run(OFFLINE, "run", **changes(OFFLINE, other))
    refused(run, "role 'teacher'", "vocabulary of 19 tokens", code=1)
    assert not (shop.folder / "run").exists(), "before anything starts"


def test_a_teacher_whose_vocabulary_is_padded_further_is_compared(shop: Workshop, tmp_path: Path) -> None:
    """The teacher has 13 more rows without tokens. Both models are compared over the same tokens."""
    padded = tiny_model(tmp_path / "padded", seed=5, vocab_size=112)
    lines = shop.train(ONLINE, "run", **changes(ONLINE, padded)).lines()
    assert all(line["policy/divergence"] > 0 for line in lines)


def test_a_share_of_the_samples_own_tokens_in_the_loss_is_refused(shop: Workshop, teacher: Path) -> None:
    run = shop.run(ONLINE, "run", **changes(ONLINE, teacher), algorithm={"loss": {"alpha": 0.5}})
    refused(run, "cross-entropy to the student's own samples", "its expected gradient is zero")


def test_answers_are_evaluated_by_a_metric_that_needs_no_score(shop: Workshop, teacher: Path) -> None:
    held_out = {"data": {"eval": str(shop.data)}, "eval": {"metric": "length"}}
    run = shop.train(ONLINE, "run", **changes(ONLINE, teacher), **held_out)
    assert run.lines()[-1]["eval/unscored"] == 1.0
