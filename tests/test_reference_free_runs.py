"""Whole runs on pairs without a reference model: they learn the preference and give the numbers of transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.runs import PAIRS, Workshop

LOSSES: dict[str, dict[str, Any]] = {
    "simpo": {},
    "orpo": {"beta": 1.0},
    "cpo": {"beta": 0.5},
}


def config(shop: Workshop, algo: str, output: str, loss: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Twelve pairs, all in each step."""
    run = shop.config("sft", output, **{"run": {"steps": 16}, "trainer": {"lr": 1e-2}, **changes})
    run["algorithm"] = {"use": algo, "loss": loss}
    run["data"] = {"train": str(shop.rows("pairs.jsonl", PAIRS)), "batch_size": 12, "max_tokens": 64}
    run["data"] |= changes.get("data", {})
    return run


@pytest.mark.parametrize("algo", LOSSES)
def test_the_preference_is_learnt(shop: Workshop, algo: str) -> None:
    held_out = [{"path": str(shop.rows("held_out.jsonl", PAIRS[::3])), "name": "held_out"}]
    run = config(shop, algo, "run", LOSSES[algo], data={"eval": held_out}, eval={"every": 16})
    finished = shop.train_config(run)
    first, last = finished.lines()[0], finished.lines()[-1]
    assert last["policy/loss"] < 0.7 * first["policy/loss"]
    assert last["policy/accuracy"] > 0.9
    assert last["policy/reward_margin"] > first["policy/reward_margin"]
    assert last["eval/accuracy"] >= 0.75
    checkpoint = finished.last_checkpoint / "roles"
    assert [path.name for path in checkpoint.iterdir()] == ["policy"], "no second model"


@pytest.mark.parametrize(
    ("algo", "loss"),
    [("simpo", {"nll_coef": 0.5}), ("orpo", {"nll_on": "all"}), ("cpo", {"loss_type": "simpo", "alpha": 0.25})],
)
def test_the_first_step_is_the_definition(shop: Workshop, algo: str, loss: dict[str, Any]) -> None:
    """Compared with transformers, one sequence at a time in fp64. The run uses several micro-batches."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = config(shop, algo, "run", loss, run={"steps": 1}, policy={"micro_tokens": 30})
    [line] = shop.train_config(run).lines()
    model = AutoModelForCausalLM.from_pretrained(shop.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(shop.model)
    chosen, rejected, texts = [], [], []
    for row in PAIRS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        for side, logprobs in (("chosen", chosen), ("rejected", rejected)):
            ids = [*prompt, *tokenizer(row[side])["input_ids"], tokenizer.eos_token_id]
            with torch.no_grad():
                logp = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            all_T = torch.stack([logp[t - 1, ids[t]] for t in range(1, len(ids))])
            logprobs.append(all_T[len(prompt) - 1 :])
            if side == "chosen":
                texts.append(all_T)
    assert line["policy/loss"] == pytest.approx(expected_loss(algo, loss, chosen, rejected, texts), rel=1e-5)


def expected_loss(algo: str, loss: dict[str, Any], chosen: list[Any], rejected: list[Any], texts: list[Any]) -> float:
    """Of lists of log-probs per token: answers, and the chosen texts with their prompts."""
    pairs = []
    for c, r in zip(chosen, rejected, strict=True):
        if algo == "simpo":
            m = 2.0 * float(c.mean() - r.mean()) - 0.5
            pairs.append(math.log1p(math.exp(-m)))
        elif algo == "orpo":
            odds = [math.exp(float(x.mean())) / (1 - math.exp(float(x.mean()))) for x in (c, r)]
            pairs.append(0.1 * math.log1p(odds[1] / odds[0]))
        else:
            a = loss["alpha"]
            reward = [(1 - math.exp(float(x.mean())) ** -a) / a for x in (c, r)]
            pairs.append(math.log1p(math.exp(-0.1 * (reward[0] - reward[1]) + 0.5)))
    nll = -torch.cat(texts if loss.get("nll_on") == "all" else chosen).mean()
    coef = {"simpo": 0.0, "orpo": 1.0, "cpo": 1.0}[algo]
    return sum(pairs) / len(pairs) + loss.get("nll_coef", coef) * float(nll)
