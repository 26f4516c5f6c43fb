"""Losses, advantages and options that several algorithms name: whole runs in which the reward rises."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.runs import PROMPTS, Finished, Workshop, merged

TWO = {"minibatches": 2}
"""Two optimizer steps, so that the policy of the second is not that of the samples."""
METHODS: dict[str, dict[str, Any]] = {
    "flash_reinforce": {},
    "max_rl": {"advantage": {"use": "max_rl"}},
    "opo": {"advantage": {"use": "opo"}},
    "pass_at_k": {"advantage": {"use": "pass_at_k", "k": 2}},
    "remax": {"advantage": {"use": "remax"}},
    "rae": {"advantage": {"use": "rae", "by": ["answer"]}},
    "dppo": {"loss": {"use": "dppo"}, **TWO},
    "vespo": {"loss": {"use": "vespo"}, **TWO},
    "gmpo": {"loss": {"use": "gmpo"}, **TWO},
    "clip_cov": {"loss": {"use": "covariance", "share": 0.05}, **TWO},
    "kl_cov": {"loss": {"use": "covariance", "treatment": "kl", "share": 0.05}, **TWO},
    "adaptive_entropy": {"entropy": {"target": 2.0}, "loss": {"entropy_coef": 0.01}},
}
RATES = {"remax": 2e-2, "rae": 2e-2}
LENGTHS = "def score(prompt, completion, row):\n    return -abs(len(completion) - 3) * 100\n"
SUMS = "def score(prompt, completion, row):\n    return len(completion) + float(row['answer'])\n"
SHORT = ("flash_reinforce", "dppo")
JUDGED = """
from dataclasses import replace
from rlhf.interfaces import Rollout


class Judged(Rollout):
    name = "judged"
    gives_rewards = True

    async def run(self, row, seed, ctx):
        prompt = ctx.encode_prompt(row)
        answer = await ctx.generate([prompt], ctx.sampling)
        return [prompt, replace(answer, reward=-100.0 * len(set(answer.ids)))]
"""
DIGITS = """
from rlhf.interfaces import Env
from rlhf.types import EnvStep


class Digits(Env):
    name = "digits"

    async def reset(self, row, seed):
        return "0"

    async def step(self, action):
        digits = sum(c in "0123456789" for c in action)
        return EnvStep(str(digits), digits / 2)
"""
"""The observation is how many digits the action had, which is also its reward."""


def turns(shop: Workshop, **env: Any) -> dict[str, Any]:
    """Sections of a run with GiGPO in three turns."""
    return {
        "rollout": {"use": "multi_turn"},
        "env": {"use": f"file:{shop.file('digits.py', DIGITS)}", "max_turns": 3, **env},
        "algorithm": {"advantage": {"use": "gigpo"}},
        "sampling": {"samples_per_prompt": 4, "max_new_tokens": 2},
        "reward": None,
    }


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
        trainer={"lr": RATES.get(method, 1e-2)},
        sampling={"samples_per_prompt": 4},
    )
    rewards = [line["reward/mean"] for line in run.lines()]
    assert sum(rewards[-5:]) > 1.25 * sum(rewards[:5])


def test_gdpo_weighs_rewards_by_their_weights_and_not_by_their_scale(shop: Workshop) -> None:
    """The second reward is hundreds of times larger. Its credit is that of the first, times its weight."""
    lengths = {"use": f"file:{shop.file('lengths.py', LENGTHS)}", "name": "lengths", "weight": 0.5}
    config = shop.config("grpo", "run", algorithm={"advantage": {"use": "gdpo"}}, run={"steps": 1})
    config["reward"].append(lengths)
    check_gdpo(shop.train_config(config), {"reward": 1.0, "lengths": 0.5})


def test_gdpo_takes_the_reward_of_a_rollout_as_one_of_the_two(shop: Workshop) -> None:
    rollout = {"use": f"file:{shop.file('judged.py', JUDGED)}"}
    config = shop.config("grpo", "run", algorithm={"advantage": {"use": "gdpo"}}, run={"steps": 1}, rollout=rollout)
    check_gdpo(shop.train_config(config), {"reward": 1.0, "env": 1.0})


def check_gdpo(run: Finished, weights: dict[str, float]) -> None:
    """Compute the advantages again from the recorded rewards. ``env``: the rewards of turns."""
    samples = list(run.samples())
    sums = [0.0] * len(samples)
    for name, weight in weights.items():
        rewards = [{**s["rewards"], "env": {"value": s["turns"][-1].get("reward")}} for s in samples]
        values = [reward[name]["value"] for reward in rewards]
        for i, s in enumerate(samples):
            group_values = [v for v, t in zip(values, samples, strict=True) if t["group"] == s["group"]]
            sums[i] += weight * (values[i] - statistics.mean(group_values)) / (statistics.stdev(group_values) + 1e-9)
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
    run = shop.train_config(config)
    assert run.lines()[0]["first/advantage/abs_max"] > 0.5


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({}, "needs at least two rewards, got 1"),
        ({"shaping": {"stop_properly": 0.5}}, "remove the options that change the sum: algorithm.shaping"),
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


def test_gigpo_learns_from_turns_that_follow_the_same_observation(shop: Workshop) -> None:
    """The credit of each token of the last step is computed again from the record."""
    run = shop.train("grpo", "run", **turns(shop), run={"steps": 15}, trainer={"lr": 2e-2})
    rewards = [line["reward/mean"] for line in run.lines()]
    assert sum(rewards[-5:]) > 1.25 * sum(rewards[:5])
    turns_of: list[list[dict[str, Any]]] = []
    for sample in (samples := list(run.samples_of("step-000015.arrow"))):
        numbers = [n for n, turn in enumerate(sample["turns"]) if turn["sampled"]]
        turns_of.append([])
        for k, n in enumerate(numbers):
            rewards_to_go = [sample["turns"][m]["reward"] for m in numbers[k:]]
            state = (sample["group"], k == 0, sample["turns"][n - 1]["text"])
            value = sum(0.95**j * reward for j, reward in enumerate(rewards_to_go))
            turns_of[-1].append({"state": state, "return": value, "tokens": len(sample["turns"][n]["ids"])})
    different = 0
    for sample, sample_turns in zip(samples, turns_of, strict=True):
        sample_advantage = standardised(
            sample["reward"], [s["reward"] for s in samples if s["group"] == sample["group"]]
        )
        expected = []
        for turn in sample_turns:
            returns = [t["return"] for turns in turns_of for t in turns if t["state"] == turn["state"]]
            expected += [sample_advantage + standardised(turn["return"], returns)] * turn["tokens"]
        advantages = sample["token_values"]["advantages"]  # one value where all are equal
        assert (advantages * len(expected))[: len(expected)] == pytest.approx(expected, abs=1e-5)
        different += len(set(advantages)) > 1
    assert different


def standardised(value: float, values: list[float]) -> float:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return (value - statistics.mean(values)) / (spread + 1e-9)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout": None, "env": None}, "assigns credit to individual turns, but each answer is one turn"),
        ({"env": {"max_turns": 1}}, "assigns credit to individual turns, but each answer is one turn"),
        ({"env": {"credit": "step"}}, "compares sums of rewards over whole trajectories"),
    ],
)
def test_gigpo_refuses_answers_of_one_turn_and_rewards_at_turns(
    shop: Workshop, changes: dict[str, Any], says: str
) -> None:
    run = shop.run_config(merged(shop.config("grpo", "run", **turns(shop)), changes))
    assert run.code == 2
    assert says in run.said


@pytest.mark.full  # test_self_play.py resumes a run with the means of two agents
def test_a_run_with_a_running_mean_that_is_resumed_ends_with_the_same_weights(shop: Workshop) -> None:
    method = {"algorithm": {"advantage": {"use": "rae", "by": ["answer"]}}, "run": {"steps": 4}}
    baseline = shop.train("grpo", "whole", **method)
    shop.train("grpo", "part", "--run.stop_after", "2", **method, checkpoint={"every": 1})
    resumed = shop.train("grpo", "part", "--resume", **method, checkpoint={"every": 1})
    assert resumed.weights == baseline.weights
    assert resumed.lines() == baseline.lines()


def test_a_column_of_the_running_mean_that_no_row_has_is_refused(shop: Workshop) -> None:
    run = shop.run("grpo", "run", "--dry-run", algorithm={"advantage": {"use": "rae", "by": ["answr"]}})
    assert run.code == 2
    assert "no column 'answr', which algorithm 'grpo' or a part of it reads" in run.said
    assert "Did you mean 'answer'?" in run.said


def test_remax_subtracts_the_reward_of_an_answer_that_is_not_trained_on(shop: Workshop) -> None:
    """A replay has it from the record, and a rollout that draws nothing is refused."""
    reward = {"use": f"file:{shop.file('sums.py', SUMS)}"}
    method = {"algorithm": {"advantage": {"use": "remax"}}, "reward": [reward]}
    run = shop.train("grpo", "run", **method)
    samples = list(run.samples())
    assert len(samples) == 3 * 4 * 3, "steps, prompts, samples"
    for s in samples:
        assert s["token_values"]["advantages"] == pytest.approx([s["reward"] - s["info"]["rollout/greedy_reward"]])
    assert len({s["info"]["rollout/greedy_reward"] for s in samples}) > 1
    rerun = shop.command("replay", str(run.path), "-o", str(shop.folder / "again"), output=shop.folder / "again")
    assert rerun.code == 0, rerun.said
    assert rerun.weights == run.weights
    refused = shop.run("grpo", "other", **method, rollout={"use": "replay", "path": str(run.path / "rollouts")})
    assert refused.code == 2
    assert "rollout 'replay' generates nothing" in refused.said


def test_remax_beside_another_method_in_one_run(shop: Workshop) -> None:
    """All prompts get a greedy answer; the other member does not read it."""
    rows = {name: str(shop.rows(f"{name}.jsonl", PROMPTS)) for name in ("sums", "others")}
    members = {
        "first": {"use": "grpo", "sources": ["sums"], "advantage": {"use": "remax"}},
        "second": {"use": "grpo", "sources": ["others"], "advantage": {"use": "rae", "by": ["answer"]}},
    }
    config = shop.config("per_source", "run", algorithm={"members": members}, run={"steps": 2})
    config["data"]["train"] = [{"path": path, "name": name} for name, path in rows.items()]
    run = shop.train_config(config)
    assert all("rollout/greedy_reward" in sample["info"] for sample in run.samples())
    assert all(line[f"{name}/advantage/abs_max"] > 0 for line in run.lines() for name in members)
