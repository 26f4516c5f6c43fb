"""Whole runs with two ranks that divide every layer give the losses, norms and final model of the embedded run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file

from tests.runs import Finished, Workshop, require

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

require("ray", "deepspeed")

DIVIDED: dict[str, Any] = {
    "launcher": {"use": "ray"},
    "trainer": {"use": "deepspeed", "stage": 2, "tensor_parallel": 2},
    "placement": {"policy": {"ranks": 2}},
}
RAGGED = {"policy": {"micro_tokens": 40}}


@pytest.fixture(scope="module")
def even(tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A model of two key-value heads, so that two ranks can divide them."""
    folder = tmp_path_factory.mktemp("even")
    return Workshop(folder, tiny_model(folder / "model", hidden=16, heads=4, kv_heads=2), tiny.data)


def assert_equal(result: Finished, reference: Finished) -> None:
    for line, expected in zip(result.lines(), reference.lines(), strict=True):
        for name in ("policy/loss", "policy/grad_norm"):
            assert abs(line[name] - expected[name]) <= 1e-4 * max(1.0, abs(expected[name])), (line["step"], name)
    a, b = (load_file(run.path / "model" / "model.safetensors") for run in (result, reference))
    assert a.keys() == b.keys()
    difference = (
        torch.stack([(a[n] - b[n]).norm() for n in b]).norm() / torch.stack([t.norm() for t in b.values()]).norm()
    )
    assert float(difference) < 1e-4


def test_supervised(even, two_cpus):
    embedded = even.train("sft", "embedded", **RAGGED)
    assert_equal(even.train("sft", "divided", **RAGGED, **DIVIDED), embedded)


def test_adapters(even, two_cpus):
    lora = {"trainer": {"lora": {"rank": 2}}}
    embedded = even.train("sft", "embedded with adapters", **RAGGED, **lora)
    divided = DIVIDED | {"trainer": DIVIDED["trainer"] | lora["trainer"]}
    assert_equal(even.train("sft", "divided with adapters", **RAGGED, **divided), embedded)


def test_recorded_rollouts(even, two_cpus):
    embedded = even.train("grpo", "recorded", **RAGGED)
    replay = {"rollout": {"use": "replay", "path": str(embedded.path / "rollouts")}}
    assert_equal(even.train("grpo", "replayed", **RAGGED, **DIVIDED, **replay), embedded)
