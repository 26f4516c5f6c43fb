"""Whole runs whose weights are stored in bf16."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import Workshop, assert_same_run

STORED = {"dtype": "auto", "storage": "bf16"}


@pytest.mark.full
def test_a_run_with_a_reference_and_its_resume(shop: Workshop) -> None:
    """The reference is stored like the policy that it starts as, so the first step's KL is exactly 0."""
    settings = {"policy": STORED, "algorithm": {"kl": {"coef": 0.1}}, "checkpoint": {"every": 1}}
    baseline = shop.train("grpo", "whole", **settings)
    assert baseline.lines()[0]["kl/reference"] == 0
    assert {t.dtype for t in load_file(baseline.path / "model" / "model.safetensors").values()} == {torch.bfloat16}
    assert "bf16 on cpu" in baseline.said
    shop.train("grpo", "parts", **settings, run={"steps": 2})
    refused = shop.run("grpo", "parts", "--resume", algorithm=settings["algorithm"], checkpoint=settings["checkpoint"])
    assert refused.code != 0
    assert "policy.storage" in refused.said
    assert_same_run(baseline, shop.train("grpo", "parts", "--resume", **settings))


@pytest.mark.full
def test_a_run_with_a_quantised_reference(shop: Workshop) -> None:
    """The reference's weights are rounded, so its log-probs are near the policy's and not equal to them."""
    pytest.importorskip("bitsandbytes")
    reference = {"storage": "fp32", "trainer": {"quantization": "int8"}}
    run = shop.train("grpo", "quantised", algorithm={"kl": {"coef": 0.1}}, reference=reference)
    assert 0 < abs(run.lines()[0]["kl/reference"]) < 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"quantization": "int8"}}, "role 'policy' is trained, but quantised"),
        ({"policy": {"storage": "bf16"}}, "storage = 'bf16' and dtype = 'fp32'"),
        ({"policy": {"storage": "fp16"}}, "policy.storage"),
        (
            {
                "reference": {"trainer": {"quantization": "int8"}},
                "algorithm": {"kl": {"coef": 0.1, "snapshot_every": 2}},
            },
            "the algorithm copies other weights to role 'reference'",
        ),
        ({"trainer": {"export_masters": True}}, "is stored in fp32, so its fp32 weights are always exported"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(shop: Workshop, changes, message) -> None:
    refused = shop.run("grpo", "refused", **changes)
    assert refused.code != 0
    assert message in refused.said
    assert not (refused.path / "metrics.jsonl").exists()
