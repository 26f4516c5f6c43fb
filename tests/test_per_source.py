"""Whole runs with an algorithm for each data source."""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from typing import Any

import pytest
import torch
from rlhf_testing.tiny import tiny_model
from transformers import AutoModelForCausalLM

from tests.forks import Forks
from tests.runs import PROMPTS, Workshop, assert_same_run, merged
from tests.test_first_step import SAMPLING, TEMPERATURE, close, first_step, norm
from tests.test_resume import KILLER, Runs

CHAT = [{"prompt": f"{a}-{b}=", "answer": str(a - b)} for a in range(4, 7) for b in range(4)]
GRPO = {"use": "grpo", "sources": ["math"], "loss": {"entropy_coef": 0.05}}
RLOO = {"use": "rloo", "sources": ["chat"], "weight": 0.5, "kl": {"coef": 0.3, "where": "loss", "target": 0.1}}
MEMBERS = {"members": {"math": GRPO, "chat": RLOO}}


def config(shop: Workshop, output: str, **changes: Any) -> dict[str, Any]:
    """A run on two sources."""
    rows = {name: [{**row, "of": name} for row in rows] for name, rows in (("math", PROMPTS), ("chat", CHAT))}
    train = [{"path": str(shop.rows(f"{name}.jsonl", examples))} for name, examples in rows.items()]
    base = shop.config("per_source", output, data={"train": train, "batch_size": 6}, algorithm=MEMBERS)
    return merged(base, changes)


def test_one_member_trains_as_its_algorithm_alone(shop: Workshop) -> None:
    options = {"kl": {"coef": 0.2, "target": 0.1, "where": "loss"}, "minibatches": 2, "mask_truncated": True}
    shared = {"sampling": {"temperature": TEMPERATURE}, "policy": {"micro_tokens": 40}}
    single = shop.train("rloo", "alone", algorithm=options, **shared)
    member = {"use": "rloo", "sources": ["data"], **options}
    split = shop.train("per_source", "split", algorithm={"members": {"all": member}}, **shared)
    assert split.weights == single.weights
    line, expected = split.lines()[-1], single.lines()[-1]
    assert line["policy/all/kl_reference"] == expected["policy/kl_reference"] > 0
    assert line["all/kl/coef"] == expected["kl/coef"] != 0.2
    assert line["all/reward/mean"] == expected["reward/mean"]


def test_the_first_step_is_the_weighted_sum_of_two_losses(shop: Workshop) -> None:
    """Computed again with transformers and plain loops: each part has its own groups, and its own number of tokens as
    divisor."""
    reference = tiny_model(shop.folder / "reference", hidden=16, heads=2, kv_heads=1, seed=5)
    run = shop.train_config(
        config(
            shop,
            "run",
            sampling=SAMPLING,
            reference={"model": str(reference)},
            policy={"micro_tokens": 40},
            run={"steps": 1},
        )
    )
    rows = list(run.samples_of("step-000001.arrow"))
    metrics, samples = first_step(run)
    model, other = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (shop.model, reference))
    values: dict[str, list[torch.Tensor]] = {"math": [], "chat": []}
    entropies, kls = [], []
    for row, sample in zip(rows, samples, strict=True):
        source = row["row"]["source"]
        rewards = [s.reward for s in samples if s.group == sample.group]
        logp, entropy = sample.log_probs(model)
        ratio = (logp - logp.detach()).exp()
        if source == "math":
            advantage = (sample.reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-9)
            values["math"].append(-ratio * advantage - 0.05 * entropy)
            entropies.append(entropy)
        else:
            advantage = sample.reward - (sum(rewards) - sample.reward) / (len(rewards) - 1)
            with torch.no_grad():
                d = logp - sample.log_probs(other)[0]
            d = logp - logp.detach() + d
            k3 = (-d).exp() - 1 + d
            values["chat"].append(-ratio * advantage + 0.3 * k3)
            kls.append(k3)
    assert min(map(len, values.values())) >= 3, "both sources are in the batch"
    total = 1.0 * torch.cat(values["math"]).mean() + 0.5 * torch.cat(values["chat"]).mean()
    total.backward()
    assert metrics["policy/loss"] == close(float(total.detach()))
    assert metrics["policy/grad_norm"] == close(norm(model))
    assert metrics["policy/math/entropy"] == close(float(torch.cat(entropies).mean()))
    assert metrics["policy/chat/kl_reference"] == close(float(torch.cat(kls).mean()))
    assert math.isclose(metrics["chat/kl/coef"], 0.3)


def test_micro_batches_change_no_step(shop: Workshop) -> None:
    """Weights after three steps: the sums of fp32 differ in their order only, by at most 1e-5 here."""
    small, large = (
        shop.run_config(config(shop, f"micro {tokens}", policy={"micro_tokens": tokens})) for tokens in (20, 4000)
    )
    a, b = (AutoModelForCausalLM.from_pretrained(run.path / "model").state_dict() for run in (small, large))
    assert max(float((a[name] - b[name]).abs().max()) for name in a) <= 1e-5


def test_members_are_options_of_the_run(shop: Workshop) -> None:
    """Flags reach options of members; the resolved configuration starts the same run again."""
    settings = config(shop, "run", run={"steps": 1})
    run = shop.train_config(
        settings, "--algorithm.members.math.loss.clip_high", "0.28", "--algorithm.members.chat.weight", "2"
    )
    resolved = tomllib.loads((run.path / "config.toml").read_text())["algorithm"]["members"]
    assert resolved["math"]["loss"]["clip_high"] == 0.28
    assert resolved["math"]["loss"]["clip_low"] == 0.2, "the defaults of the member's algorithm hold"
    assert (resolved["chat"]["weight"], resolved["chat"]["kl"]["coef"]) == (2.0, 0.3)
    rerun = shop.command("train", str(run.path / "config.toml"), "--run.output", str(shop.folder / "again"),
                         output=shop.folder / "again")  # fmt: skip
    assert rerun.code == 0, rerun.said
    assert rerun.weights == run.weights


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"members": {"math": {"sources": ["maths"]}}},
            "'maths' is not a source of data.train; its sources are 'math', 'chat'",
        ),
        ({"members": {"chat": {"use": "gone"}}}, "'gone'"),
        ({"members": {"chat": {"clip": 1}}}, "algorithm.members.chat.clip"),
        ({"members": {"math": {"loss": {"clip_hihg": 0.3}}}}, "algorithm.members.math.loss.clip_hihg"),
        ({"members": {"math": {"use": None}}}, "algorithm.members.math.use"),
        ({"members": {"math": "grpo"}}, "algorithm.members.math"),
        ({"members": None}, "required, but not set. Write a table [algorithm.members.NAME] for each"),
        ({"members": {"math": {"critic_warmup": 2}}}, "algorithm.members.math.critic_warmup = 2 needs a critic"),
        ({"members": {"math": {"minibatches": 500}, "chat": {"minibatches": 500}}}, "--algorithm.members.math.minib"),
    ],
)
def test_wrong_members_are_refused_with_their_path(shop: Workshop, changes: dict[str, Any], message: str) -> None:
    run = shop.run_config(config(shop, "run", algorithm=changes), "--dry-run")
    assert run.code != 0
    assert message in run.said


def rewards(shop: Workshop) -> list[dict[str, Any]]:
    """A reward for each source, which fails on rows of the other one."""
    start = "async def score(prompt, completion, row):"
    texts = {
        "digits": f"{start}\n    assert row['of'] == 'math'\n    return float('1' in completion)\n",
        "short": f"{start}\n    assert row['of'] == 'chat'\n    return -len(completion) / 9\n",
    }
    files = {name: shop.file(f"{name}.py", text) for name, text in texts.items()}
    sources = {"digits": ["math"], "short": ["chat"]}
    return [{"use": f"file:{files[name]}", "sources": source_names} for name, source_names in sources.items()]


def test_a_reward_scores_the_rows_of_its_sources_only(shop: Workshop) -> None:
    run = shop.train_config(config(shop, "run", reward=rewards(shop), run={"steps": 2}))
    samples = list(run.samples())
    values = {s: {row["reward"] for row in samples if row["row"]["source"] == s} for s in ("math", "chat")}
    assert values["math"] <= {0.0, 1.0}
    assert max(values["chat"]) <= 0.0 > min(values["chat"])


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ((["math"], ["math"]), "no reward scores the rows of 'chat' of data.train"),
        (
            (["math"], ["chta"]),
            "reward.short.sources: 'chta' is not a source of data.train or data.eval; available: 'math'",
        ),
    ],
)
def test_sources_of_rewards_are_checked(shop: Workshop, sources: Any, message: str) -> None:
    settings = [
        {**reward, "sources": source_names} for reward, source_names in zip(rewards(shop), sources, strict=True)
    ]
    run = shop.run_config(config(shop, "run", reward=settings), "--dry-run")
    assert run.code != 0
    assert message in run.said


def test_jobs_read_a_run_file_whose_rewards_name_sources_of_training_rows(shop: Workshop) -> None:
    """These rows are not read. The reward of the held-out rows gives the same as in the run's own evaluation."""
    digits, short = rewards(shop)
    settings = [{**digits, "sources": ["math", "held_out"]}, short]
    held_out = [{"path": str(shop.rows("held_out.jsonl", [{**row, "of": "math"} for row in PROMPTS[:3]]))}]
    file = config(shop, "run", reward=settings, run={"steps": 1}, data={"eval": held_out})
    (line,) = shop.train_config(file).lines()
    path = shop.folder / "run.toml"
    evaluated = shop.command("eval", str(path), "--model", str(shop.folder / "run" / "model"), "--json")
    assert evaluated.code == 0, evaluated.said
    metrics = json.loads(evaluated.out)
    assert (metrics["prompts"], metrics["reward"]) == (3, line["eval/reward"])
    scores = shop.folder / "scores.jsonl"
    for words in (["score", str(path), "-o", str(scores)], ["rewards", "try", str(path)], ["rewards", "try", "RUN"]):
        job = shop.command(*(str(shop.folder / "run") if word == "RUN" else word for word in words))
        assert job.code == 0, job.said
    assert [json.loads(row)["rewards"]["short"]["value"] for row in scores.read_text().splitlines()] == [None] * 3


def test_killed_and_resumed_it_is_the_run_that_was_never_interrupted(forks: Forks, shop: Workshop) -> None:
    """The state of a member, its adaptive KL coefficient, is in the checkpoint."""
    runs = Runs(forks, shop)
    settings = {
        "run": {"steps": 5},
        "checkpoint": {"every": 2, "keep": 2},
        "observer": [{"use": f"file:{shop.file('killer.py', KILLER)}"}],
        "algorithm": {
            "members": {
                "math": {"minibatches": 2, "weight_end": 0.2, "weight_steps": 4},
                "chat": {"minibatches": 2},
            }
        },
    }
    baseline, broken = (config(shop, name, **settings) for name in ("whole", "broken"))
    runs.die_at(broken, "step 4")
    finished, expected = runs.resume(broken), runs.end(baseline)
    assert "resumed after step 2" in finished.err
    assert expected.code == 0, expected.err
    assert_same_run(finished, expected)
    coefficients = [line["chat/kl/coef"] for line in expected.lines() if "chat/kl/coef" in line]
    assert len(set(coefficients)) == len(coefficients) > 2
    assert [line["math/weight"] for line in expected.lines()] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


# ------------------------------------------------------------------------------------- demonstrations


EXPERTS = [{"prompt": f"{a}*{b}=", "response": str(a * b)} for a in range(4, 7) for b in range(4)]


def with_experts(shop: Workshop, output: str, **changes: Any) -> dict[str, Any]:
    """A run that samples answers to half of its rows, and is trained on the answers of the others."""
    files = {"math": shop.rows("math.jsonl", [{k: row[k] for k in ("prompt", "answer")} for row in PROMPTS])}
    files["experts"] = shop.rows("experts.jsonl", EXPERTS)
    members = {
        "math": {"use": "grpo", "sources": ["math"]},
        "experts": {"use": "sft", "sources": ["experts"], "weight": 0.3},
    }
    base = shop.config(
        "per_source",
        output,
        data={"train": [{"path": str(path), "probability": 0.5} for path in files.values()], "batch_size": 6},
        algorithm={"members": members},
        sampling=SAMPLING,
    )
    return merged(base, changes)


def test_demonstrations_and_samples_in_one_step(shop: Workshop) -> None:
    """The first step computed again: the mean of each member over its own tokens, at the weight of the run file."""
    run = shop.train_config(with_experts(shop, "run", policy={"micro_tokens": 40}, run={"steps": 1}))
    rows = list(run.samples_of("step-000001.arrow"))
    metrics = run.lines()[0]
    model = AutoModelForCausalLM.from_pretrained(shop.model, dtype=torch.float32)
    policy, nll = [], []
    for row in rows:
        ids = [token for turn in row["turns"] for token in turn["ids"]]
        mask = [turn["sampled"] for turn in row["turns"] for _ in turn["ids"]]
        is_demonstration = row["row"]["source"] == "experts"
        logits = model(torch.tensor([ids])).logits[0].double() / (1.0 if is_demonstration else TEMPERATURE)
        logp = torch.stack([logits.log_softmax(-1)[i - 1, ids[i]] for i in range(len(ids)) if mask[i]])
        if is_demonstration:
            assert row["turns"][1]["text"] == EXPERTS[row["row"]["index"]]["response"]
            nll.append(-logp)
            continue
        rewards = [other["reward"] for other in rows if other["group"] == row["group"]]
        advantage = (row["reward"] - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-9)
        policy.append(-(logp - logp.detach()).exp() * advantage)
    assert len(nll) == metrics["stream/demonstrations"] >= 2
    assert len(policy) == 3 * (6 - len(nll)) >= 3
    total = torch.cat(policy).mean() + 0.3 * torch.cat(nll).mean()
    total.backward()
    assert metrics["policy/loss"] == close(float(total.detach()))
    assert metrics["policy/grad_norm"] == close(norm(model))
    assert metrics["policy/experts/nll"] == close(float(torch.cat(nll).mean()))


def test_demonstrations_are_learnt_beside_a_reward_that_rises(shop: Workshop) -> None:
    run = shop.train_config(with_experts(shop, "run", run={"steps": 15}, trainer={"lr": 1e-2}))
    lines = run.lines()
    nll = [line["policy/experts/nll"] for line in lines if "policy/experts/nll" in line]
    rewards = [line["math/reward/mean"] for line in lines if "math/reward/mean" in line]
    assert statistics.mean(nll[-4:]) < statistics.mean(nll[:4]) - 1
    assert statistics.mean(rewards[-5:]) > statistics.mean(rewards[:5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"use": "number_game"}, "rollout": {"use": "multi_turn"}}, "the rows of 'experts'"),
        ({"data": {"response": "gone"}}, "'gone'"),
    ],
)
def test_demonstrations_that_do_not_fit_are_refused(shop: Workshop, changes: dict[str, Any], message: str) -> None:
    run = shop.run_config(with_experts(shop, "run", **changes), "--dry-run")
    assert run.code != 0
    assert message in run.said
