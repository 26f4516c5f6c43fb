"""First losses of the algorithms that learn from given rows, beside plain transformers in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.real_model.plain import DIALOGUES, Plain, chatml, needs_model, scores
from tests.runs import Workshop

pytestmark = [pytest.mark.slow, pytest.mark.full, needs_model]


def sft_loss(chosen: list[Tensor], rejected: list[Tensor]) -> float:
    return -float(torch.cat(chosen).mean())


def simpo_loss(chosen: list[Tensor], rejected: list[Tensor]) -> float:
    """beta = 2, gamma = 0.5 (a target margin, not divided by beta)."""
    margins = torch.stack([2.0 * (c.mean() - r.mean()) - 0.5 for c, r in zip(chosen, rejected, strict=True)])
    return -float(logsigmoid(margins).mean())


def orpo_loss(chosen: list[Tensor], rejected: list[Tensor]) -> float:
    """The NLL of the chosen answers' tokens, and 0.1 times the odds-ratio term."""

    def log_odds(logprobs: Tensor) -> Tensor:
        mean = logprobs.mean()
        return mean - torch.log1p(-torch.exp(mean))

    ratios = torch.stack([log_odds(c) - log_odds(r) for c, r in zip(chosen, rejected, strict=True)])
    return sft_loss(chosen, rejected) - 0.1 * float(logsigmoid(ratios).mean())


def cpo_loss(chosen: list[Tensor], rejected: list[Tensor]) -> float:
    """beta = 0.1, and the NLL of the chosen answers' tokens."""
    margins = torch.stack([0.1 * (c.sum() - r.sum()) for c, r in zip(chosen, rejected, strict=True)])
    return -float(logsigmoid(margins).mean()) + sft_loss(chosen, rejected)


def constant(value: float) -> Callable[..., float]:
    """Policy and reference are one model."""
    return lambda chosen, rejected: value


@pytest.mark.parametrize(
    ("algorithm", "statement"),
    [
        ("dpo", constant(0.6931471805599453)),
        ("sft", sft_loss),
        ("simpo", simpo_loss),
        ("orpo", orpo_loss),
        ("cpo", cpo_loss),
        ("kto_pair", constant(0.5)),
    ],
)
def test_first_losses_are_those_of_plain_transformers_in_fp64(
    real: Workshop, answers: dict[str, list[Tensor]], algorithm: str, statement: Callable[..., float]
) -> None:
    """Within 1e-4 of the value: the arithmetic is fp32, through 30 layers."""
    rows = [{"prompt": r["prompt"], "response": r["chosen"]} for r in DIALOGUES] if algorithm == "sft" else DIALOGUES
    changes = {"data": {"train": str(real.rows("these.jsonl", rows))}, "run": {"steps": 1}, "trainer": {"lr": 1e-9}}
    run = real.train(algorithm, "first", **changes, sampling=None, reward=None)
    value = statement(answers["chosen"], answers["rejected"])
    assert run.lines()[0]["policy/loss"] == pytest.approx(value, rel=1e-4)
    if algorithm == "dpo":
        for role, logprobs in answers.items():
            mean = float(torch.stack([t.sum() for t in logprobs]).mean())
            assert run.lines()[0][f"policy/{role}_logprobs"] == pytest.approx(mean, rel=1e-4)


@torch.no_grad()
def test_the_first_loss_of_a_reward_model_with_a_new_head_is_that_of_plain_transformers_in_fp64(
    real: Workshop, fp64: Plain
) -> None:
    run = real.train("reward_model", "scores", data={"train": str(real.data)}, run={"steps": 1}, trainer={"lr": 1e-9})
    head = load_file(run.path / "model" / "model.safetensors")["score.weight"][0].double()
    assert float(head.std()) == pytest.approx(1 / 577, rel=0.1)
    chosen, rejected = (
        torch.stack(
            [scores(head, fp64.model.model, fp64.ids(d["prompt"], d[r][0]["content"])[0])[-1] for d in DIALOGUES]
        )
        for r in ("chosen", "rejected")
    )
    margins = chosen - rejected
    line = run.lines()[0]
    assert line["policy/loss"] == pytest.approx(-float(logsigmoid(margins).mean()), rel=1e-4)
    assert line["policy/margin"] == pytest.approx(float(margins.mean()), abs=1e-4)
    assert line["policy/chosen_score"] == pytest.approx(float(chosen.mean()), abs=1e-4)


def test_the_first_loss_of_kto_with_labels_is_that_of_plain_transformers_in_fp64(
    real: Workshop, fp64: Plain, cut: Path
) -> None:
    """The reference is the first four layers, so log-ratios and the drift on mismatched answers are not 0."""
    reference, (desirable, undesirable) = Plain.load(cut, torch.float64), (1.5, 0.7)
    rows = [
        {"prompt": row["prompt"], "response": row[role], "label": role == "chosen"}
        for role, row in zip(("chosen", "rejected", "chosen", "rejected"), DIALOGUES, strict=True)
    ]

    def ratio(prompt: Sequence[Mapping[str, str]], answer: Sequence[Mapping[str, str]]) -> Tensor:
        logprobs, reference_logprobs = (model.answer(prompt, answer[0]["content"]) for model in (fp64, reference))
        return (logprobs - reference_logprobs).sum()

    drifts = [ratio(row["prompt"], rows[i - 1]["response"]) for i, row in enumerate(rows)]
    z = torch.stack(drifts).mean().clamp(min=0)
    losses = [
        desirable * torch.sigmoid(0.01 * (z - h)) if row["label"] else undesirable * torch.sigmoid(0.01 * (h - z))
        for row, h in zip(rows, (ratio(row["prompt"], row["response"]) for row in rows), strict=True)
    ]
    run = real.train(
        "kto",
        "labels",
        data={"train": str(real.rows("labels.jsonl", rows))},
        algorithm={"loss": {"beta": 0.01, "desirable_weight": desirable, "undesirable_weight": undesirable}},
        reference={"model": str(cut)},
        run={"steps": 1},
        trainer={"lr": 1e-9},
    )
    line = run.lines()[0]
    assert float(z) > 1
    assert line["policy/kl"] == pytest.approx(float(z), rel=1e-4)
    assert line["policy/loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)


@torch.no_grad()
def test_the_first_loss_of_distillation_is_that_of_plain_transformers_in_fp64(
    real: Workshop, fp64: Plain, cut: Path
) -> None:
    """The teacher is the first four layers. Half the loss is the KL from it, half the cross-entropy of the answers."""
    teacher = Plain.load(cut, torch.float64)
    rows = [{"prompt": row["prompt"], "response": row["chosen"]} for row in DIALOGUES]
    run = real.train(
        "distill",
        "first",
        data={"train": str(real.rows("demonstrations.jsonl", rows))},
        roles={"teacher": {"model": str(cut), "dtype": "fp32"}},
        run={"steps": 1},
        trainer={"lr": 1e-9},
        sampling=None,
        reward=None,
    )
    answers = [fp64.ids(row["prompt"], row["chosen"][0]["content"]) for row in DIALOGUES]
    logp_TV, logq_TV = (torch.cat([model.distributions(*answer) for answer in answers]) for model in (teacher, fp64))
    divergence = float((logp_TV.exp() * (logp_TV - logq_TV)).sum(1).mean())
    nll = -float(torch.cat([fp64.logprobs(*answer) for answer in answers]).mean())
    line = run.lines()[0]
    assert divergence > 1
    assert line["policy/divergence"] == pytest.approx(divergence, rel=1e-4)
    assert line["policy/nll"] == pytest.approx(nll, rel=1e-4)
    assert line["policy/loss"] == pytest.approx((divergence + nll) / 2, rel=1e-4)
    agreement = float((logp_TV.argmax(1) == logq_TV.argmax(1)).double().mean())
    assert line["policy/agreement"] == pytest.approx(agreement)


@torch.no_grad()
def test_the_first_loss_of_a_process_reward_model_is_that_of_plain_transformers_in_fp64(
    real: Workshop, fp64: Plain
) -> None:
    """A step is right with the probability of "+" against "-" after the line that ends it."""
    steps, labels = ["17 + 25 is 17 + 20 + 5.", "That is 37 + 5.", "So it is 43."], [1.0, 0.75, 0.0]
    question = DIALOGUES[0]["prompt"]
    row = {"prompt": question, "completions": steps, "labels": labels}
    run = real.train(
        "prm",
        "first",
        data={"train": str(real.rows("steps.jsonl", [row])), "batch_size": 1, "max_tokens": 128},
        algorithm={"head": "lm", "label_tokens": ["+", "-"]},
        run={"steps": 1},
        trainer={"lr": 1e-9},
        sampling=None,
        reward=None,
    )
    right, wrong = (fp64.tokenizer.encode(text, add_special_tokens=False)[0] for text in ("+", "-"))
    losses = []
    for number, label in enumerate(labels, start=1):
        text = "".join(piece for piece, _ in chatml(question, "")[:-1]) + "".join(
            f"{step}\n" for step in steps[:number]
        )
        ids = fp64.tokenizer(text, add_special_tokens=False)["input_ids"]
        logits_V = fp64.model(torch.tensor([ids])).logits[0, -1]
        log_odds = logits_V[right] - logits_V[wrong]
        losses.append(-label * logsigmoid(log_odds) - (1 - label) * logsigmoid(-log_odds))
    assert run.lines()[0]["policy/loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)
