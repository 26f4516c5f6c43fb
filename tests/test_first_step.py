"""The first step of whole runs, computed again from the samples they saved: one sequence at a time, by transformers and
plain loops, with nothing of the framework. Gradient norms and metrics must be those of the run."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_testing.tiny import tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.runs import Finished, Workshop

GAME = {"rollout": {"use": "multi_turn"}, "env": {"use": "number_game", "max_turns": 3}}
TEMPERATURE = 0.7
SAMPLING = {"samples_per_prompt": 3, "max_new_tokens": 3, "temperature": TEMPERATURE}


class Sample:
    """One saved trajectory, laid end to end."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.group, self.reward, self.source = line["group"], line["reward"], line["row"]["source"]
        assert not any(turn.get("fresh") for turn in line["turns"])
        self.ids: list[int] = []
        self.own: list[int] = []
        """Positions that the policy sampled."""
        self.sampled_with: list[float] = []
        self.turn_rewards: list[tuple[int, float]] = []
        """(own token at which a turn ended, what the environment gave for the turn)."""
        for turn in line["turns"]:
            if turn["sampled"]:
                self.own += range(len(self.ids), len(self.ids) + len(turn["ids"]))
                self.sampled_with += turn["logprobs"]
                self.cut = turn["finish"] == "length"
                self.turn_rewards.append((len(self.own) - 1, turn["reward"]))
            self.ids += turn["ids"]

    def log_probs(self, model: Any) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy) of each own token, at the temperature it was drawn with."""
        logits = model(torch.tensor([self.ids])).logits[0].double() / TEMPERATURE
        logp = logits.log_softmax(-1)
        logprobs = torch.stack([logp[i - 1, self.ids[i]] for i in self.own])
        return logprobs, torch.stack([-(logp[i - 1].exp() * logp[i - 1]).sum() for i in self.own])


def first_step(run: Finished) -> tuple[dict[str, Any], list[Sample]]:
    return run.lines()[0], [Sample(line) for line in run.samples_of("step-000001.arrow")]


def norm(model: torch.nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))


def close(value: float) -> Any:
    return pytest.approx(value, rel=2e-4, abs=2e-6)


def test_grpo_over_turns_with_an_entropy_bonus_a_correction_and_kl_as_a_loss(shop: Workshop) -> None:
    reference = tiny_model(shop.folder / "reference", hidden=16, heads=2, kv_heads=1, seed=5)
    loss = {"aggregation": "seq_mean_token_mean", "entropy_coef": 0.05, "correction": {"preset": "tis", "low": 0.0}}
    kl = {"coef": 0.3, "where": "loss"}
    run = shop.train(
        "grpo",
        "run",
        **GAME,
        sampling={**SAMPLING, "top_p": 0.9},
        algorithm={"kl": kl, "loss": loss},
        reference={"model": str(reference)},
        policy={"micro_tokens": 40},
        run={"steps": 1},
    )
    metrics, samples = first_step(run)
    assert len(samples) == 12
    assert any(s.own != list(range(s.own[0], s.own[-1] + 1)) for s in samples), "observations between answers"
    model, other = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (shop.model, reference))
    total, entropies, kls, weights = torch.zeros(()), [], [], []
    for sample in samples:
        rewards = [s.reward for s in samples if s.group == sample.group]
        advantage = (sample.reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-9)
        logp, entropy = sample.log_probs(model)
        with torch.no_grad():
            d = logp - sample.log_probs(other)[0]
        k3 = (-(logp - logp.detach() + d)).exp() - 1 + (logp - logp.detach() + d)
        weight = (logp.detach() - torch.tensor(sample.sampled_with)).exp().clamp(0, 5)
        assert bool((weight < 1 + 1e-4).all()), "top_p: what was drawn is at most as likely under all tokens"
        ratio = (logp - logp.detach()).exp()
        values = -weight * ratio * advantage + 0.3 * k3 - 0.05 * entropy
        total = total + values.mean() / len(samples)
        entropies, kls, weights = [*entropies, entropy], [*kls, k3], [*weights, weight]
    total.backward()
    assert metrics["policy/loss"] == close(float(total.detach()))
    assert metrics["policy/grad_norm"] == close(norm(model))
    assert metrics["policy/entropy"] == close(float(torch.cat(entropies).mean()))
    assert metrics["policy/kl_reference"] == close(float(torch.cat(kls).mean()))
    assert metrics["policy/correction_weight"] == close(float(torch.cat(weights).mean()))
    assert float(torch.cat(weights).min()) < 0.99
    assert metrics["length/mean"] == close(statistics.mean(len(s.own) for s in samples))


@pytest.mark.parametrize("turn_credit", ["outcome", "step"])
def test_ppo_over_turns_with_a_critic_kl_in_the_reward_and_bootstrapping(shop: Workshop, turn_credit: str) -> None:
    paths = {n: tiny_model(shop.folder / n, hidden=16, heads=2, kv_heads=1, seed=s, head=h)  # type: ignore[arg-type]
             for n, s, h in (("reference", 5, "lm"), ("critic", 6, "scalar"))}  # fmt: skip
    run = shop.train(
        "ppo",
        "run",
        rollout=GAME["rollout"],
        env={**GAME["env"], "credit": turn_credit},
        sampling=SAMPLING,
        algorithm={
            "kl": {"coef": 0.2},
            "bootstrap_truncated": True,
            "shaping": {"overlong_max": 9, "overlong_buffer": 6, "overlong_factor": 0.5},
            "advantage": {"gamma": 0.9, "lam": 0.8},
        },
        **{name: {"model": str(path)} for name, path in paths.items()},
        run={"steps": 1},
    )
    metrics, samples = first_step(run)
    policy, reference = (AutoModelForCausalLM.from_pretrained(p) for p in (shop.model, paths["reference"]))
    critic = AutoModelForSequenceClassification.from_pretrained(paths["critic"], num_labels=1)
    assert any(s.cut for s in samples)
    assert not all(s.cut for s in samples)
    logps, values, advantages, returns = [], [], [], []
    for s in samples:
        logp, _ = s.log_probs(policy)
        with torch.no_grad():
            kl = logp - s.log_probs(reference)[0]
        hidden = critic.model(torch.tensor([s.ids])).last_hidden_state[0]
        value_at = critic.score(hidden)[:, 0]
        value = torch.stack([value_at[i - 1] for i in s.own])
        rewards = [-0.2 * float(k) for k in kl]
        excess = min(max(len(s.own) - 3, 0), 6)
        rewards[-1] += s.reward - 0.5 * excess / 6
        for token, reward in s.turn_rewards if turn_credit == "step" else ():
            rewards[token] += reward
        after, advantage = (float(value_at[s.own[-1]]) if s.cut else 0.0), 0.0
        found_backwards = []
        for r, v in zip(reversed(rewards), reversed(value.tolist()), strict=True):
            advantage = r + 0.9 * after - v + 0.9 * 0.8 * advantage
            after = v
            found_backwards.append(advantage)
        credit = torch.tensor(found_backwards[::-1])
        logps, values = [*logps, logp], [*values, value]
        advantages, returns = [*advantages, credit], [*returns, credit + value.detach()]
    raw, logp, value, target = (torch.cat(x) for x in (advantages, logps, values, returns))
    white = (raw - raw.mean()) / raw.std(correction=0)
    (-(logp - logp.detach()).exp() * white).mean().backward()
    ((value - target).square() / 2).mean().backward()
    assert metrics["advantage/mean"] == close(float(raw.mean()))
    assert metrics["advantage/std"] == close(float(raw.std(correction=0)))
    assert metrics["policy/grad_norm"] == close(norm(policy))
    assert metrics["critic/loss"] == close(float(((value - target).square() / 2).mean().detach()))
    assert metrics["critic/grad_norm"] == close(norm(critic))
    assert metrics["value/explained_variance"] == close(float(1 - (target - value).var() / target.var()))


def test_several_passes_clip_the_policy_and_the_values(shop: Workshop) -> None:
    """Three optimizer steps on one batch: the ratio leaves 1, both clips bite, and AdamW steps with a falling rate."""
    critic_path = tiny_model(shop.folder / "critic", hidden=16, heads=2, kv_heads=1, seed=6, head="scalar")
    low, high, dual, reach = 0.02, 0.05, 1.1, 0.01
    run = shop.train(
        "ppo",
        "run",
        sampling={**SAMPLING, "max_new_tokens": 6},
        algorithm={
            "epochs": 3,
            "loss": {"clip_low": low, "clip_high": high, "dual_clip": dual},
            "value_loss": {"clip": reach},
        },
        critic={"model": str(critic_path)},
        trainer={"lr": 3e-3, "schedule": "linear", "weight_decay": 0.1, "max_grad_norm": 0.5},
        policy={"micro_tokens": 25},
        run={"steps": 1},
    )
    metrics, samples = first_step(run)
    policy = AutoModelForCausalLM.from_pretrained(shop.model)
    critic = AutoModelForSequenceClassification.from_pretrained(critic_path, num_labels=1)

    def values() -> Tensor:
        values_of_samples = [
            critic.score(critic.model(torch.tensor([s.ids])).last_hidden_state[0])[:, 0] for s in samples
        ]
        return torch.cat(
            [torch.stack([v[i - 1] for i in s.own]) for s, v in zip(samples, values_of_samples, strict=True)]
        )

    def optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)

    old_logp = torch.cat([s.log_probs(policy)[0] for s in samples]).detach()
    old_value = values().detach()
    target = torch.cat([torch.full((len(s.own),), float(s.reward)) for s in samples])
    raw = target - old_value
    white = (raw - raw.mean()) / raw.std(correction=0)
    steppers, norms, clipped, drift = {m: optimizer(m) for m in (policy, critic)}, {policy: [], critic: []}, [], []
    for number in range(3):
        logp, value = torch.cat([s.log_probs(policy)[0] for s in samples]), values()
        ratio = (logp - old_logp).exp()
        plain, cut = ratio * white, ratio.clamp(1 - low, 1 + high) * white
        objective = torch.minimum(plain, cut)
        floor = torch.where(white < 0, torch.maximum(objective, dual * white), objective)
        clipped.append(float(((cut < plain) | (floor > objective)).double().mean()))
        drift.append(float((ratio - 1 - (logp - old_logp)).detach().mean()))
        clip_value = old_value + (value - old_value).clamp(-reach, reach)
        worst = torch.maximum((clip_value - target).square(), (value - target).square())
        for model, loss in ((policy, -floor.mean()), (critic, worst.mean() / 2)):
            loss.backward()
            norms[model].append(norm(model))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for group in steppers[model].param_groups:
                group["lr"] = 3e-3 * (1 - number / 3)
            steppers[model].step()
            model.zero_grad()
    assert clipped[0] == 0
    assert clipped[2] > 0.1
    assert max(norms[policy]) > 0.5
    for name, values_of_steps in (("clip_fraction", clipped), ("kl_old", drift), ("grad_norm", norms[policy])):
        assert metrics[f"policy/{name}"] == pytest.approx(statistics.mean(values_of_steps), rel=2e-3), name
    assert metrics["critic/grad_norm"] == pytest.approx(statistics.mean(norms[critic]), rel=2e-3)
    assert metrics["policy/lr"] == pytest.approx(1e-3)
    exported = AutoModelForCausalLM.from_pretrained(run.path / "model").state_dict()
    initial = AutoModelForCausalLM.from_pretrained(shop.model).state_dict()
    moved, error = (
        math.sqrt(sum(float((policy.state_dict()[n] - other[n]).square().sum()) for n in exported))
        for other in (initial, exported)
    )
    assert error < 0.01 * moved


def test_saved_samples_have_the_fields_that_these_tests_read(shop: Workshop) -> None:
    run = shop.train("rloo", "run", run={"steps": 1})
    _, samples = first_step(run)
    model = AutoModelForCausalLM.from_pretrained(Path(shop.model))
    for s in samples:
        logits = model(torch.tensor([s.ids])).logits[0].log_softmax(-1)
        assert [float(logits[i - 1, s.ids[i]].detach()) for i in s.own] == pytest.approx(s.sampled_with, abs=1e-5)
