"""Losses, advantages and options that several algorithms name: whole runs in which the reward rises."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.runs import PROMPTS, Workshop

TWO = {"minibatches": 2}
"""Two optimizer steps, so that the policy of the second is not that of the samples."""
METHODS: dict[str, dict[str, Any]] = {
    "flash_reinforce": {},
    "max_rl": {"advantage": {"use": "max_rl"}},
    "opo": {"advantage": {"use": "opo"}},
    "pass_at_k": {"advantage": {"use": "pass_at_k", "k": 2}},
    "dppo": {"loss": {"use": "dppo"}, **TWO},
    "vespo": {"loss": {"use": "vespo"}, **TWO},
    "gmpo": {"loss": {"use": "gmpo"}, **TWO},
    "clip_cov": {"loss": {"use": "covariance", "share": 0.05}, **TWO},
    "kl_cov": {"loss": {"use": "covariance", "treatment": "kl", "share": 0.05}, **TWO},
    "adaptive_entropy": {"entropy": {"target": 2.0}, "loss": {"entropy_coef": 0.01}},
}
LENGTHS = "def score(prompt, completion, row):\n    return -abs(len(completion) - 3) * 100\n"
SHORT = ("flash_reinforce", "dppo")


@pytest.mark.parametrize(
    "method", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in METHODS]
)
def test_the_reward_rises(shop: Workshop, method: str) -> None:
    """Fifteen steps. The reward of an untrained policy is 0.12 to 0.15, that of the last five steps 0.19 or more."""
    run = shop.train(
        method if method == "flash_reinforce" else "grpo",
        "run",
        algorithm=METHODS[method],
        run={"steps": 15},
        trainer={"lr": 1e-2},
        sampling={"samples_per_prompt": 4},
    )
    rewards = [line["reward/mean"] for line in run.lines()]
    assert sum(rewards[-5:]) > 1.25 * sum(rewards[:5])


def test_gdpo_weighs_rewards_by_their_weights_and_not_by_their_scale(shop: Workshop) -> None:
    """The second reward is hundreds of times larger. Its credit is that of the first, times its weight."""
    lengths = {"use": f"file:{shop.file('lengths.py', LENGTHS)}", "name": "lengths", "weight": 0.5}
    config = shop.config("grpo", "run", algorithm={"advantage": {"use": "gdpo"}}, run={"steps": 1})
    config["reward"].append(lengths)
    run = shop.run_config(config)
    assert run.code == 0, run.said
    samples = list(run.samples())
    sums = [0.0] * len(samples)
    for name, weight in (("reward", 1.0), ("lengths", 0.5)):
        values = [s["rewards"][name]["value"] for s in samples]
        for i, s in enumerate(samples):
            own = [v for v, t in zip(values, samples, strict=True) if t["group"] == s["group"]]
            sums[i] += weight * (values[i] - statistics.mean(own)) / (statistics.stdev(own) + 1e-9)
    advantages = [s["token_values"]["advantages"][0] for s in samples]
    spread = statistics.stdev(sums)
    assert advantages == pytest.approx([(s - statistics.mean(sums)) / spread for s in sums], rel=1e-5, abs=1e-6)


def test_gdpo_is_a_member_of_a_run_with_several_algorithms(shop: Workshop) -> None:
    """The third reward is of the other source: for the member's samples it gave no value."""
    rows = {name: str(shop.rows(f"{name}.jsonl", PROMPTS)) for name in ("sums", "others")}
    members = {
        "first": {"use": "grpo", "sources": ["sums"], "advantage": {"use": "gdpo"}},
        "second": {"use": "rloo", "sources": ["others"]},
    }
    config = shop.config("per_source", "run", algorithm={"members": members}, run={"steps": 2})
    config["data"]["train"] = [{"path": path, "name": name} for name, path in rows.items()]
    lengths = f"file:{shop.file('lengths.py', LENGTHS)}"
    config["reward"] += [{"use": lengths}, {"use": lengths, "name": "other", "sources": ["others"]}]
    run = shop.run_config(config)
    assert run.code == 0, run.said
    assert run.lines()[0]["first/advantage/abs_max"] > 0.5


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({}, "needs two or more, got 1"),
        ({"shaping": {"stop_properly": 0.5}}, "algorithm.shaping changes the sum of the rewards"),
    ],
)
def test_gdpo_refuses_one_reward_and_options_of_the_sum(shop: Workshop, algorithm: dict[str, Any], says: str) -> None:
    config = shop.config("grpo", "run", algorithm={"advantage": {"use": "gdpo"}, **algorithm})
    run = shop.run_config(config)
    assert run.code == 2
    assert says in run.said


def test_pass_at_k_refuses_groups_below_k(shop: Workshop) -> None:
    run = shop.run_config(shop.config("grpo", "run", algorithm={"advantage": {"use": "pass_at_k", "k": 4}}))
    assert run.code == 2
    assert "needs at least 4 samples per prompt, got 3" in run.said
