"""Whole runs that learn from pairs, given and sampled: they learn, evaluate and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.forks import Forks
from tests.runs import Workshop, assert_same_run
from tests.test_resume import KILLER, Runs

PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a in range(4) for b in range(4)]
REWARD = "async def score(prompt, completion, row):\n    return float(sum(c in '0123456789' for c in completion))\n"
"""Whole numbers, so that some groups are tied."""


def offline(shop: Workshop, output: str, loss: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    run = shop.config("sft", output, **{"run": {"steps": 4}, "trainer": {"lr": 1e-2}, **changes})
    data = shop.rows("pairs.jsonl", PAIRS)
    run["algorithm"] = {"use": "dpo", "loss": loss or {}, **changes.get("algorithm", {})}
    run["data"] = {"train": str(data), "batch_size": 8, "max_tokens": 64, **changes.get("data", {})}
    return run


def online(shop: Workshop, output: str, **changes: Any) -> dict[str, Any]:
    return shop.config(
        "grpo",
        output,
        **{
            "run": {"steps": 5},
            "algorithm": {"use": "online_dpo", **changes.pop("algorithm", {})},
            "reward": [{"use": f"file:{shop.file('ones.py', REWARD)}"}],
            "sampling": {"samples_per_prompt": 4},
            **changes,
        },
    )


@pytest.fixture
def runs(forks: Forks, shop: Workshop) -> Runs:
    return Runs(forks, shop)


def test_the_loss_of_each_source_is_that_of_the_source_alone(shop: Workshop) -> None:
    sources = [{"path": str(shop.rows(f"{name}.jsonl", PAIRS[rows])), "name": name}
               for name, rows in {"few": slice(3), "many": slice(5, 12)}.items()]  # fmt: skip
    run = offline(shop, "both", data={"eval": sources}, eval={"metric": "many/accuracy"})
    metrics = shop.train_config(run).lines()[-1]
    for source in sources:
        single = shop.train_config(offline(shop, source["name"], data={"eval": [source]})).lines()[-1]
        of_source = {name.replace(f"eval/{source['name']}/", "eval/"): value
                     for name, value in metrics.items() if name.startswith(f"eval/{source['name']}/")}  # fmt: skip
        assert of_source == {name: value for name, value in single.items() if name.startswith("eval/")}
    assert metrics["eval/few/loss"] != metrics["eval/many/loss"]


def test_dpo_learns_the_preference_and_evaluates_on_held_out_pairs(shop):
    held_out = [{"path": str(shop.rows("held_out.jsonl", PAIRS[::3])), "name": "held_out"}]
    run = offline(shop, "run", {"beta": 0.5}, run={"steps": 16}, eval={"every": 16}, data={"eval": held_out})
    lines = shop.train_config(run).lines()
    first, last = lines[0], lines[-1]
    assert first["policy/loss"] == pytest.approx(0.693147, abs=1e-5), "policy and reference are one model at first"
    assert first["policy/reward_margin"] == 0
    assert first["policy/accuracy"] == 0.5, "policy and reference are one model"
    assert last["policy/reward_margin"] > 0.5
    assert last["policy/accuracy"] > 0.9
    assert last["policy/loss"] < 0.5
    assert last["eval/accuracy"] > 0.9
    assert last["eval/loss"] < 0.6
    names = {"chosen_reward", "rejected_reward", "chosen_logprobs", "rejected_logprobs", "nll", "loss/sigmoid"}
    assert {f"eval/{name}" for name in names} <= set(last)


def test_micro_batches_change_nothing_for_losses_of_the_whole_batch(shop):
    loss = {"loss_type": ["aot", "aot_unpaired", "sft"], "loss_weights": [1.0, 0.5, 0.1]}
    full = shop.train_config(offline(shop, "whole", loss)).lines()
    split = shop.train_config(offline(shop, "split", loss, policy={"micro_tokens": 12})).lines()
    for first, second in zip(full, split, strict=True):
        assert first["policy/loss"] == pytest.approx(second["policy/loss"], rel=1e-4)


def test_the_running_shift_is_resumed_and_ignores_evaluations(runs: Runs) -> None:
    loss = {"loss_type": "bco_pair", "bco_shift": "running"}
    killer = [{"use": f"file:{runs.shop.file('killer.py', KILLER)}"}]
    held_out = [{"path": str(runs.shop.rows("held_out.jsonl", PAIRS[:3])), "name": "held_out"}]

    def config(name: str, **changes: Any) -> dict[str, Any]:
        return offline(runs.shop, name, loss, run={"steps": 5}, checkpoint={"every": 2}, observer=killer, **changes)

    evaluated = {"data": {"eval": held_out}, "eval": {"every": 1}}
    baseline, plain = runs.end(config("whole", **evaluated)), runs.end(config("without"))
    assert baseline.code == plain.code == 0, baseline.err + plain.err
    shifts = [line["bco_shift"] for line in baseline.lines()]
    assert shifts[:2] == [0, 0], "the first step's rewards are 0, as the policy is its reference"
    assert len(set(shifts)) == len(shifts) - 1
    assert shifts == [line["bco_shift"] for line in plain.lines()]
    assert baseline.weights == plain.weights

    broken = config("broken", **evaluated)
    runs.die_at(broken, "step 4")
    assert_same_run(runs.resume(broken), baseline)


ITERATIVE = {
    "algorithm": {"snapshot_every": 2, "minibatches": 2},
    "stream": {"round": 2},
    "checkpoint": {"every": 1, "keep": 5},
}


@pytest.mark.parametrize(
    "event",
    [
        pytest.param("saved 2", id="at a snapshot"),
        pytest.param("step 4", id="behind it", marks=pytest.mark.full),
        pytest.param("rollouts 3", id="in a round", marks=pytest.mark.full),
    ],
)
def test_online_dpo_resumes_across_its_snapshots(runs: Runs, event: str) -> None:
    killer = {"observer": [{"use": f"file:{runs.shop.file('killer.py', KILLER)}"}]}
    baseline = runs.end(online(runs.shop, "whole", **ITERATIVE, **killer))
    assert baseline.code == 0, baseline.err
    broken = online(runs.shop, "broken", **ITERATIVE, **killer)
    runs.die_at(broken, event)
    assert_same_run(runs.resume(broken), baseline)


def test_a_run_that_stopped_before_its_first_snapshot_may_be_resumed_for_more_steps(shop: Workshop) -> None:
    """Nothing is a snapshot within one step, so its checkpoint holds the policy alone."""
    soft = {"algorithm": {"snapshot_every": 2}, "trainer": {"lr": 1e-2, "schedule": "constant"}}
    baseline = shop.train_config(offline(shop, "whole", run={"steps": 4}, **soft))
    short = shop.train_config(offline(shop, "short", run={"steps": 1}, **soft))
    assert [p.name for p in (short.last_checkpoint / "roles").iterdir()] == ["policy"]
    longer = shop.train_config(offline(shop, "short", run={"steps": 4}, **soft), "--resume")
    assert longer.weights == baseline.weights


def test_a_snapshot_is_the_policy_that_samples_the_next_round(shop):
    """The step behind a snapshot starts with a margin of 0; inside a round the policy has left its reference."""
    run = online(shop, "run", algorithm={"snapshot_every": 2}, stream={"round": 2}, trainer={"lr": 1e-2})
    margins = [line["policy/reward_margin"] for line in shop.train_config(run).lines()]
    assert margins[0] == margins[2] == margins[4] == 0
    assert margins[1] != 0
    assert margins[3] != 0
    checkpoint = Path(run["run"]["output"]) / "checkpoints/step-000005/roles"
    assert (checkpoint / "reference/model.safetensors").exists()


@pytest.mark.full
def test_a_reference_that_follows_the_policy_is_mixed_of_both_and_resumes(runs: Runs) -> None:
    """TR-DPO, stated from the weights in the checkpoints: after every second step 0.6 policy + 0.4 old reference."""
    soft = {"algorithm": {"snapshot_every": 2, "snapshot_share": 0.6}, "checkpoint": {"every": 1, "keep": 9}}
    killer = {"observer": [{"use": f"file:{runs.shop.file('killer.py', KILLER)}"}]}
    baseline = runs.end(run := offline(runs.shop, "whole", **soft, **killer))
    assert baseline.code == 0, baseline.err

    def weights(step: int, role: str) -> dict[str, torch.Tensor]:
        return load_file(Path(run["run"]["output"]) / f"checkpoints/step-{step:06}/roles/{role}/model.safetensors")

    old = weights(1, "reference")
    for step in (2, 4):
        policy, new = weights(step, "policy"), weights(step, "reference")
        expected = {name: 0.6 * policy[name].double() + 0.4 * old[name].double() for name in old}
        assert max(float((policy[name] - old[name]).abs().max()) for name in old) > 1e-3
        for name in old:
            torch.testing.assert_close(new[name].double(), expected[name], rtol=1e-6, atol=1e-8)
        old = new
    assert all(torch.equal(tensor, weights(3, "reference")[name]) for name, tensor in weights(2, "reference").items())

    broken = offline(runs.shop, "broken", **soft, **killer)
    runs.die_at(broken, "step 3")
    assert_same_run(runs.resume(broken), baseline)


def test_online_dpo_raises_the_reward_and_counts_ties(shop):
    run = online(shop, "run", run={"steps": 24}, trainer={"lr": 1e-2}, algorithm={"loss": {"beta": 0.5}})
    finished = shop.train_config(run)
    lines = [line for line in finished.lines() if "empty" not in line]
    pairs, tied, groups = (sum(line[f"pairs/{name}"] for line in lines) for name in ("made", "tied_groups", "groups"))
    assert pairs > 0
    assert pairs + tied + sum(line["pairs/equal_answers"] for line in lines) == groups
    assert all(line["pairs/chosen_score"] > line["pairs/rejected_score"] for line in lines)
    rewards = [sample["reward"] for sample in finished.samples()]
    quarter = len(rewards) // 4
    assert sum(rewards[-quarter:]) / quarter > sum(rewards[:quarter]) / quarter + 0.3


def test_online_dpo_allows_truncated_sampling(shop):
    """No importance weight enters a loss of pairs, wherever they come from."""
    shop.train_config(online(shop, "run", sampling={"top_p": 0.9}), "--dry-run")


FEWER = """
calls = 0


async def score(prompt, completion, row):
    global calls
    calls += 1
    if calls <= 16:
        return float(calls in (1, 5))  # two groups of the first step with a best sample
    return 1.0 if calls <= 32 else float(calls % 4)  # none in the second, four in the third
"""


def test_the_schedule_ends_with_the_run_where_steps_have_few_pairs_or_none(shop):
    changes = {"run": {"steps": 3}, "trainer": {"lr": 1e-3, "schedule": "linear"}}
    run = online(shop, "run", algorithm={"minibatches": 3, "epochs": 2}, **changes)
    run["reward"] = [{"use": f"file:{shop.file('fewer.py', FEWER)}"}]
    lines = shop.train_config(run).lines()
    pairs = [line.get("pairs/made", 0.0) for line in lines]
    assert pairs[0] in (1, 2)
    assert pairs[1] == 0
    assert lines[1]["empty"] == 1
    for step in (0, 2):  # the last of 2 x min(3, pairs) optimizer steps, of 6 planned for each of 3 steps
        last = 6 * step + 2 * min(3, pairs[step]) - 1
        assert lines[step]["policy/lr"] == pytest.approx(1e-3 * (1 - last / 18))


def test_a_snapshot_is_taken_at_a_step_without_pairs(shop):
    """The third step starts with a margin of 0: its reference is the policy after the second step, which is empty."""
    run = online(shop, "run", run={"steps": 3}, trainer={"lr": 1e-2}, algorithm={"snapshot_every": 2})
    run["reward"] = [{"use": f"file:{shop.file('fewer.py', FEWER)}"}]
    lines = shop.train_config(run).lines()
    assert lines[1]["empty"] == 1
    assert lines[2]["policy/reward_margin"] == 0


def test_options_are_checked_before_anything_starts(shop):
    finished = shop.run_config(offline(shop, "run", {"loss_type": "ipo", "label_smoothing": 0.1}))
    assert finished.code == 2
    assert "label_smoothing = 0.1 is read by" in finished.said
    few = shop.run_config(online(shop, "few", sampling={"samples_per_prompt": 1}))
    assert "needs at least 2 samples per prompt" in few.said
    assert "Traceback" not in few.said
