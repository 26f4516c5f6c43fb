"""First steps of the algorithms that sample, and log-probs of samples, beside plain transformers in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.real_model.plain import QUESTIONS, SAMPLED, Plain, needs_model, scores
from tests.runs import Workshop, merged
from tests.test_first_step import Sample, first_step, norm

pytestmark = [pytest.mark.slow, pytest.mark.full, needs_model]


def step_on_samples(real: Workshop, use: str, **changes: Any) -> tuple[dict[str, Any], list[Sample]]:
    """The metrics of a first step on two prompts, and its samples. The reward is the length of an answer."""
    real.rows("rows.jsonl", QUESTIONS)
    reward = real.file("length.py", "def score(prompt, completion, row):\n    return len(completion) / 32\n")
    first = {"run": {"steps": 1}, "trainer": {"lr": 1e-9}, "reward": [{"use": f"file:{reward}"}]}
    line, samples = first_step(real.train(use, "samples", **merged(merged(SAMPLED, first), changes)))
    assert len(samples) == 8
    assert len({sample.reward for sample in samples}) > 2, "rewards that differ"
    return line, samples


def grad_norm(model: Any, loss: Tensor) -> float:
    model.zero_grad()
    loss.backward()
    value = norm(model)
    model.zero_grad()
    return value


def token_weights(algorithm: str, samples: Sequence[Sample]) -> list[float]:
    """The factor of a token's log-prob in the first gradient, for each sample."""
    rewards_GS = torch.tensor([s.reward for s in samples], dtype=torch.float64).view(2, 4)
    own_GS = torch.tensor([len(s.own) for s in samples], dtype=torch.float64).view(2, 4)
    centred_GS = rewards_GS - rewards_GS.mean(1, keepdim=True)
    if algorithm == "rejection_sampling":
        kept_GS = torch.zeros_like(own_GS).scatter(1, rewards_GS.argmax(1, keepdim=True), 1.0)
        return (kept_GS / (kept_GS * own_GS).sum()).flatten().tolist()
    if algorithm == "dr_grpo":
        return (centred_GS / (8 * 256)).flatten().tolist()
    if algorithm in ("grpo", "dapo"):
        values_GS = centred_GS / (rewards_GS.std(1, keepdim=True) + 1e-9)
    elif algorithm == "rloo":
        values_GS = centred_GS * 4 / 3
    else:  # whitened over all tokens
        raw_GS = rewards_GS if algorithm == "reinforce_pp" else centred_GS
        mean = (raw_GS * own_GS).sum() / own_GS.sum()
        variance = ((raw_GS - mean).square() * own_GS).sum() / own_GS.sum()
        values_GS = (raw_GS - mean) / variance.sqrt()
    return (values_GS / own_GS.sum()).flatten().tolist()


@pytest.mark.parametrize(
    "algorithm",
    ["rloo", "grpo", "dapo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline", "rejection_sampling"],
)
def test_first_steps_on_samples_are_those_of_plain_transformers_in_fp64(
    real: Workshop, fp64: Plain, algorithm: str
) -> None:
    line, samples = step_on_samples(real, algorithm)
    weights = token_weights(algorithm, samples)
    sums = [fp64.token_logprobs(s.ids, s.own[0]).sum() for s in samples]
    objective = sum((w * value for w, value in zip(weights, sums, strict=True)), torch.zeros(()))
    likelihood = algorithm == "rejection_sampling"  # elsewhere the ratio to the policy before the step, which is 1
    value = (
        float(objective.detach()) if likelihood else sum(w * len(s.own) for w, s in zip(weights, samples, strict=True))
    )
    assert line["policy/loss"] == pytest.approx(-value, rel=1e-4, abs=1e-5)
    assert line["policy/grad_norm"] == pytest.approx(grad_norm(fp64.model, objective), rel=1e-3)


def test_the_first_step_of_ppo_is_that_of_plain_transformers_in_fp64(real: Workshop, fp64: Plain, cut: Path) -> None:
    """The critic is the first four layers with a head of its own; advantages are not whitened, or their mean is 0."""
    from transformers import AutoModelForSequenceClassification

    critic = AutoModelForSequenceClassification.from_pretrained(str(cut), num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(critic.score.weight, std=0.05, generator=torch.Generator().manual_seed(1))
    critic.save_pretrained(str(real.folder / "critic"))
    fp64.tokenizer.save_pretrained(str(real.folder / "critic"))
    critic = critic.double()
    line, samples = step_on_samples(
        real,
        "ppo",
        algorithm={"advantage": {"normalise": "none"}},
        critic={"model": str(real.folder / "critic")},
    )
    states = [scores(critic.score.weight[0], critic.model, s.ids)[s.own[0] - 1 : -1] for s in samples]
    logprobs_A = torch.cat([fp64.token_logprobs(s.ids, s.own[0]) for s in samples])
    values_A, returns_A = torch.cat(states), torch.cat([torch.full((len(s.own),), s.reward) for s in samples])
    advantages_A, value_loss = returns_A - values_A.detach(), (values_A - returns_A).square().mean() / 2
    assert line["policy/loss"] == pytest.approx(-float(advantages_A.mean()), rel=1e-4)
    assert line["policy/grad_norm"] == pytest.approx(
        grad_norm(fp64.model, (advantages_A * logprobs_A).mean()), rel=1e-3
    )
    assert line["critic/loss"] == pytest.approx(float(value_loss.detach()), rel=1e-4)
    assert line["critic/grad_norm"] == pytest.approx(grad_norm(critic, value_loss), rel=1e-3)


def test_the_first_step_of_online_dpo_is_that_of_plain_transformers_in_fp64(
    real: Workshop, fp64: Plain, cut: Path
) -> None:
    """The longest answer of a prompt is chosen and its shortest rejected; the reference is the first four layers."""
    line, samples = step_on_samples(real, "online_dpo", reference={"model": str(cut)})
    reference, losses = Plain.load(cut, torch.float64), []
    for group in sorted({s.group for s in samples}):
        ranked = sorted((s for s in samples if s.group == group), key=lambda s: s.reward)
        ratios = [
            fp64.token_logprobs(s.ids, s.own[0]).sum() - reference.logprobs(s.ids, s.own[0]).sum()
            for s in (ranked[-1], ranked[0])
        ]
        losses.append(-logsigmoid(0.1 * (ratios[0] - ratios[1])))
    loss = torch.stack(losses).mean()
    assert line["pairs/made"] == len(losses) == 2
    assert line["policy/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert line["policy/grad_norm"] == pytest.approx(grad_norm(fp64.model, loss), rel=1e-3)


def test_the_first_step_of_distillation_on_samples_is_that_of_plain_transformers_in_fp64(
    real: Workshop, fp64: Plain, cut: Path
) -> None:
    """The KL to the teacher, the first four layers, at each token that the student sampled."""
    line, samples = step_on_samples(real, "distill_on_policy", roles={"teacher": {"model": str(cut), "dtype": "fp32"}})
    teacher, divergences = Plain.load(cut, torch.float64), []
    for s in samples:
        logq_TV = fp64.distributions(s.ids, s.own[0])
        with torch.no_grad():
            logp_TV = teacher.distributions(s.ids, s.own[0])
        divergences.append((logq_TV.exp() * (logq_TV - logp_TV)).sum(1))
    loss = torch.cat(divergences).mean()
    assert line["policy/loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert line["policy/grad_norm"] == pytest.approx(grad_norm(fp64.model, loss), rel=1e-3)


def test_the_first_step_with_an_algorithm_for_each_source_is_that_of_plain_transformers_in_fp64(
    real: Workshop, fp64: Plain
) -> None:
    """grpo on two rows and rloo, with half the weight, on the two others. Each divides by its own tokens."""
    train = [{"path": str(real.rows(f"{name}.jsonl", QUESTIONS[i : i + 2]))} for i, name in ((0, "sums"), (2, "words"))]
    members = {
        "sums": {"use": "grpo", "sources": ["sums"]},
        "words": {"use": "rloo", "sources": ["words"], "weight": 0.5},
    }
    line, samples = step_on_samples(
        real,
        "per_source",
        data={"train": train, "batch_size": 4},
        sampling={"samples_per_prompt": 2},
        algorithm={"members": members},
    )
    objective, parts = torch.zeros(()), {}
    for sample in samples:
        parts.setdefault(sample.source, []).append(sample)
    assert sorted(map(len, parts.values())) == [4, 4]
    for source, part in parts.items():
        tokens = sum(len(s.own) for s in part)
        for s in part:
            (other,) = (o for o in part if o.group == s.group and o is not s)
            gap = s.reward - other.reward
            advantage = gap if source == "words" else gap / 2 / (abs(gap) / 2**0.5 + 1e-9)
            weight = (0.5 if source == "words" else 1.0) * advantage / tokens
            objective = objective + weight * fp64.token_logprobs(s.ids, s.own[0]).sum()
    assert line["policy/grad_norm"] == pytest.approx(grad_norm(fp64.model, objective), rel=1e-3)


def test_sampled_logprobs_are_those_of_plain_transformers_in_fp64(real: Workshop, fp64: Plain) -> None:
    """The trainer's are those of the generator."""
    real.rows("rows.jsonl", QUESTIONS)
    changes = merged(SAMPLED, {"sampling": {"samples_per_prompt": 2}, "run": {"steps": 1}, "trainer": {"lr": 1e-9}})
    run = real.train("grpo", "sampled", **changes)
    samples = list(run.samples())
    assert len(samples) == 4
    for sample in samples:
        prompt, answer = sample["turns"]
        plain_T = fp64.logprobs([*prompt["ids"], *answer["ids"]], len(prompt["ids"]))
        assert torch.tensor(answer["logprobs"]).sub(plain_T).abs().max() < 1e-3
    assert abs(run.lines()[0]["policy/kl_generator"]) < 1e-6
