"""Cross entropy on observations in whole runs (``echo_coef``)."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runs import Workshop
from tests.test_first_step import GAME, SAMPLING, Sample, close, norm

COEF = 0.1


def likelihoods(line: dict[str, Any], model: Any) -> Tensor:
    """-log p of each observation token of a saved sample, at temperature 1."""
    ids, positions = [], []
    for turn in line["turns"]:
        if ids and not turn["sampled"] and any(t["sampled"] for t in line["turns"][: line["turns"].index(turn)]):
            positions += range(len(ids), len(ids) + len(turn["ids"]))
        ids += turn["ids"]
    logp = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return -torch.stack([logp[i - 1, ids[i]] for i in positions]) if positions else torch.zeros(0)


def test_the_first_step_computed_again(shop: Workshop) -> None:
    """One sequence at a time, by transformers and plain loops."""
    run = shop.train(
        "grpo", "run", **GAME, sampling=SAMPLING, policy={"micro_tokens": 40}, run={"steps": 1},
        algorithm={"echo_coef": COEF},
    )  # fmt: skip
    metrics, lines = run.lines()[0], list(run.samples())
    samples = [Sample(line) for line in lines]
    model = AutoModelForCausalLM.from_pretrained(shop.model, dtype=torch.float32)
    policy, nll = [], []
    for sample, line in zip(samples, lines, strict=True):
        rewards = [s.reward for s in samples if s.group == sample.group]
        advantage = (sample.reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-9)
        logp, _ = sample.log_probs(model)
        policy.append(-(logp - logp.detach()).exp() * advantage)
        nll.append(likelihoods(line, model))
    observed = [values for values in nll if len(values)]
    assert len(observed) >= 6
    total = torch.cat(policy).mean() + COEF * torch.stack([values.mean() for values in observed]).mean()
    total.backward()
    assert metrics["policy/loss"] == close(float(total.detach()))
    assert metrics["policy/grad_norm"] == close(norm(model))
    assert metrics["policy/observation_nll"] == close(float(torch.cat(observed).mean()))


def test_samples_without_an_advantage_teach_their_observations(shop: Workshop) -> None:
    """All rewards are equal. The gradient is that of the observations; samples without one are left out."""
    game = {**GAME, "env": {**GAME["env"], "found": 0.0, "cost": 0.0, "invalid_cost": 0.0}}
    run = shop.train("grpo", "run", **game, reward=None, algorithm={"echo_coef": COEF})
    for line in run.lines():
        assert line["advantage/abs_max"] == 0
        assert line["policy/grad_norm"] > 0
        assert line["policy/loss"] == pytest.approx(line["policy/loss/echo"])


def test_a_member_learns_observations_as_its_algorithm_alone(shop: Workshop) -> None:
    options, shared = {"echo_coef": COEF}, {**GAME, "policy": {"micro_tokens": 40}}
    single = shop.train("grpo", "alone", algorithm=options, **shared)
    member = {"use": "grpo", "sources": ["data"], **options}
    run = shop.train("per_source", "member", algorithm={"members": {"all": member}}, **shared)
    assert run.weights == single.weights
    nll = [[line[name] for line in member_run.lines()] for member_run, name in
           ((run, "policy/all/observation_nll"), (single, "policy/observation_nll"))]  # fmt: skip
    assert nll[0] == nll[1]


def test_a_run_without_observations_is_refused(shop: Workshop) -> None:
    game = {**GAME, "env": {**GAME["env"], "max_turns": 1}}
    run = shop.run("grpo", "run", "--dry-run", algorithm={"echo_coef": COEF}, **game)
    assert run.code == 2
    assert "env.max_turns above 1" in run.said


def player(source: Path, folder: Path) -> Path:
    """A model that was trained on random episodes: it asks for numbers, and half knows what is answered."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=1e-2), random.Random(0)

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for _ in range(40):
        losses = []
        for _ in range(24):
            hidden, episode = rng.randint(1, 9), ids("?1-9:")
            start = len(episode)
            for question in (rng.randint(1, 9) for _ in range(4)):
                episode += [*ids(str(question)), tokenizer.eos_token_id]
                if question == hidden:
                    break
                episode += ids("<" if hidden < question else ">")
            logp = model(torch.tensor([episode])).logits[0].log_softmax(-1)
            losses.append(-torch.stack([logp[i - 1, episode[i]] for i in range(start, len(episode))]))
        torch.cat(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.full
def test_held_out_observations_become_likelier_and_the_reward_does_not_suffer(shop: Workshop) -> None:
    base = player(shop.model, shop.folder / "base")
    changes = {
        "rollout": {"use": "multi_turn"},
        "env": {"use": "number_game", "max_turns": 4, "high": 9},
        "policy": {"model": str(base)},
        "data": {"train": str(shop.rows("game.jsonl", [{"prompt": "?"}] * 12))},
        "sampling": {"samples_per_prompt": 8, "max_new_tokens": 2},
        "reward": None,
    }

    def train(output: str, steps: int, seed: int, lr: float, **algorithm: Any) -> Any:
        options = {"run": {"steps": steps, "seed": seed}, "trainer": {"lr": lr}, "algorithm": algorithm}
        return shop.train("grpo", output, **changes, **options)

    held_out = list(train("held out", 2, 77, 1e-8).samples())

    def nll(folder: Path) -> float:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            return float(torch.cat([likelihoods(line, model) for line in held_out]).mean())

    plain, echo = train("plain", 40, 1, 3e-3), train("echo", 40, 1, 3e-3, echo_coef=COEF)
    rewards = {run: [line["reward/mean"] for line in run.lines()] for run in (plain, echo)}
    first, last = (statistics.mean(rewards[echo][part]) for part in (slice(16), slice(-16, None)))
    assert nll(echo.path / "model") < nll(base) - 0.2
    assert nll(plain.path / "model") > nll(base)
    assert last > first + 0.05
    assert last > statistics.mean(rewards[plain][-16:]) - 0.1
