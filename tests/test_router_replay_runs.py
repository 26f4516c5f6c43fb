"""Runs that replay the experts of samples: records are kept, replayed from a recording, and checked."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from rlhf_testing.models import model_path

from tests.runs import Workshop, change_rows

SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
REPLAY: dict[str, Any] = {"trainer": {"router_replay": True}}
GAME = {"rollout": {"use": "multi_turn"}, "env": {"use": "number_game", "max_turns": 3}}


@pytest.fixture
def moe(shop: Workshop) -> Workshop:
    return Workshop(shop.folder, model_path("qwen3_moe", **SIZES), shop.data)


def recording(run: Any) -> dict[str, Any]:
    return {"rollout": {"use": "replay", "path": str(run.path / "rollouts")}, "data": {"max_tokens": 64}}


def records(run: Any) -> list[tuple[int, dict[str, Any]]]:
    """(tokens of the turn, record) of each turn with a record."""
    return [(len(t["ids"]), t["experts"]) for s in run.samples() for t in s["turns"] if t["experts"] is not None]


def test_records_are_kept_and_a_replay_of_them_learns_the_same(moe: Workshop) -> None:
    first = moe.train("grpo", "recorded", **REPLAY)
    rerun = moe.train("grpo", "replayed", **REPLAY, **recording(first))
    assert (rerun.weights, rerun.rollouts()) == (first.weights, first.rollouts())
    for line in first.lines():  # one of at most 11 tokens of each sample is not known: the last one
        assert 1 / 12 < line["policy/experts_unrecorded"] < 1 / 4
        assert line["policy/kl_generator"] < 1e-9
    default = moe.train("grpo", "off")
    assert not records(default)
    plain = {k: v for k, v in first.lines()[0].items() if k != "policy/experts_unrecorded"}
    assert default.lines()[0] == pytest.approx(plain, rel=1e-5, abs=1e-9)  # sums of another order of prefixes
    unrecorded = moe.train("grpo", "unrecorded", **REPLAY, **recording(default))
    assert [line["policy/experts_unrecorded"] for line in unrecorded.lines()] == [1.0] * 3
    assert unrecorded.weights == default.weights


def test_turns_of_an_environment_record_each_token_once(moe: Workshop) -> None:
    run = moe.train("ppo", "game", **GAME, **REPLAY)
    for sample in run.samples():
        tokens = sum(len(turn["ids"]) for turn in sample["turns"])
        parts = [base64.b64decode(t["experts"]["choices"]) for t in sample["turns"] if t["experts"] is not None]
        decisions = sum(len(part) for part in parts) // 4  # 2 layers of 2 experts
        after = sum(len(turn["ids"]) for turn in sample["turns"][1 + last_sampled(sample) :])
        assert decisions == tokens - after - 1
    assert all(line["policy/kl_generator"] < 1e-9 for line in run.lines())
    assert "critic/experts_unrecorded" not in run.lines()[0]


def last_sampled(sample: dict[str, Any]) -> int:
    return max(n for n, turn in enumerate(sample["turns"]) if turn["sampled"])


def test_changed_records_change_the_log_probs(moe: Workshop) -> None:
    first = moe.train("grpo", "recorded", **REPLAY)

    def swap(rows: list[dict[str, Any]]) -> None:
        for turn in (t for row in rows for t in row["turns"] if t["experts"] is not None):
            choices = base64.b64decode(turn["experts"]["choices"])
            turn["experts"]["choices"] = base64.b64encode(bytes(3 - c for c in choices)).decode()

    for file in (first.path / "rollouts").iterdir():
        change_rows(file, swap)
    rerun = moe.train("grpo", "replayed", **REPLAY, **recording(first))
    assert all(line["policy/kl_generator"] > 1e-4 for line in rerun.lines())


def test_records_of_another_model_fail_the_sample_with_its_cause(moe: Workshop) -> None:
    first = moe.train("grpo", "recorded", **REPLAY)
    larger = Workshop(moe.folder, model_path("qwen3_moe", **{**SIZES, "num_experts": 8}), moe.data)
    refused = larger.run("grpo", "other", **REPLAY, **recording(first))
    assert refused.code == 1
    assert (
        "its record of experts comes from a model with 2 layers of 4 experts, 2 for each token; the policy has 2 "
        "layers of 8"
    ) in refused.said.replace("\n", " ")
    larger.train("grpo", "off", **recording(first))


@pytest.mark.parametrize(
    ("algorithm", "changes", "words"),
    [
        ("sft", {}, "this run learns from data"),
        (
            "grpo",
            {"launcher": {"use": "simulated"}, "generator": {"use": "simulated"}},
            "does not record them (it lacks the",
        ),
        ("grpo", {"generator": {"use": "vllm", "prefix_caching": False}}, "prefix_caching = false does not report"),
    ],
    ids=["offline", "generator", "vllm"],
)
def test_runs_without_records_are_refused_before_the_start(
    moe: Workshop, algorithm: str, changes: dict[str, Any], words: str
) -> None:
    refused = moe.run(algorithm, "refused", "--dry-run", **{**REPLAY, **changes})
    assert refused.code == 2
    assert words in refused.said.replace("\n", " ")
