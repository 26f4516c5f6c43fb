"""Distillation on Ray, with ZeRO-3 over two ranks of student and teacher, gives the losses of the embedded runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlhf_testing.tiny import tiny_model

from tests.runs import Workshop, require
from tests.test_distillation import self_taught

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

require("ray", "deepspeed")

ON_RANKS: dict[str, Any] = {
    "launcher": {"use": "ray", "cpus": 2},
    "trainer": {"use": "deepspeed", "stage": 3, "keep_whole": 0},
    "placement": {"policy": {"ranks": 2}, "teacher": {"ranks": 2, "share": "policy"}},
    "policy": {"micro_tokens": 24},
}


def changes(teacher: Path) -> dict[str, Any]:
    return {"run": {"steps": 5}, "reward": None, "roles": {"teacher": {"model": str(teacher), "dtype": "fp32"}}}


def agree(lines: list[dict[str, Any]], expected: list[dict[str, Any]], steps: int = 5) -> None:
    assert len(lines) == len(expected) == steps
    for a, b in zip(lines, expected, strict=True):
        for name in ("policy/loss", "policy/divergence", "policy/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), (a["step"], name)


def test_two_ranks_of_student_and_teacher(shop: Workshop) -> None:
    """On answers of the student. The teacher's head is tied, divided over the ranks, and has a larger padded
    vocabulary."""
    padded = tiny_model(shop.folder / "padded", seed=6, std=0.2, vocab_size=112)
    settings = {**changes(padded), "algorithm": {"loss": {"divergence": "jsd"}}}
    sampled = shop.train("distill_on_policy", "sampled", **settings)
    replayed = {**settings, "rollout": {"use": "replay", "path": str(sampled.path / "rollouts")}}
    repeat = shop.train("distill_on_policy", "replayed", **replayed, **ON_RANKS)
    agree(repeat.lines(), sampled.lines())


def test_two_ranks_of_a_student_that_is_its_teacher(shop: Workshop) -> None:
    """The teacher's top tokens, which it reads after another prompt, are columns that go from rank to rank."""
    options = {"run": {"steps": 5}, **self_taught(shop, {"divergence": "jsd", "top_k": 7}, weights="live")}
    sampled = shop.train("distill_on_policy", "sampled", **options)
    replayed = {**options, "rollout": {"use": "replay", "path": str(sampled.path / "rollouts")}}
    repeat = shop.train(
        "distill_on_policy", "replayed", **replayed, **ON_RANKS | {"placement": {"policy": {"ranks": 2}}}
    )
    agree(repeat.lines(), sampled.lines())


def test_two_ranks_on_given_answers(shop: Workshop) -> None:
    """Offline with ZeRO-2. A step has three rows, so that one rank has one row and a filler. The teacher's head is not
    tied."""
    teacher = tiny_model(shop.folder / "teacher", seed=5, std=0.2, tied=False)
    settings = {**changes(teacher), "run": {"steps": 3}, "data": {"batch_size": 3}, "sampling": None}
    settings["algorithm"] = {"loss": {"divergence": "reverse_kl", "alpha": 0.7}}
    embedded = shop.train("distill", "embedded", **settings)
    ranks = shop.train("distill", "ranks", **settings, **{**ON_RANKS, "trainer": {"use": "deepspeed", "stage": 2}})
    agree(ranks.lines(), embedded.lines(), 3)
    assert embedded.lines()[0]["policy/nll"] != embedded.lines()[0]["policy/divergence"]
