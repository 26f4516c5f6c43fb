"""Policy losses equal recorded losses and gradients of TRL 1.16.0's code on random tokens, for each seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rlhf.ops.loss_value import evaluate
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.plugins import Plugins
from rlhf_algorithms.kl import WithKL

RECORDED = json.loads((Path(__file__).parents[1] / "benchmarks/parity/trl-1.16.0-policy.json").read_text())
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
WIDE = {"clip_low": 0.1, "clip_high": 0.15}
LOSSES = {
    "dapo": ("ppo", CLIPS),
    "grpo": ("ppo", {**CLIPS, "aggregation": "seq_mean_token_mean"}),
    "delta": ("ppo", {**CLIPS, "dual_clip": 1.5}),
    "gspo": ("gspo", WIDE),
    "luspo": ("gspo", {**WIDE, "aggregation": "seq_mean_token_sum"}),
    "cispo": ("cispo", {"clip_low": 1.0, "clip_high": 0.4}),
    "sapo": ("sapo", {}),
    "vespo": ("vespo", {}),
    "top-entropy": ("ppo", {**CLIPS, "top_entropy": 0.4}),
    "stale": ("ppo", {**CLIPS, "stale_mask": 0.05}),
    "kl": ("ppo", CLIPS),
    "unbiased-kl": ("ppo", CLIPS),
}


def one_batch(record):
    """A sequence for each row, after a prompt of one token."""
    names = ("old_logprobs", "ref_logprobs", "gen_logprobs")
    units = []
    for b, advantage in enumerate(record["advantages"]):
        n = len(record["logprobs"][b])
        tok = {name: [0.0, *record[name][b]] for name in names}
        tok |= {"loss_mask": [False] + [True] * n, "advantages": [0.0] + [advantage] * n}
        tok["uncertainty"] = [0.0, *record["entropy"][b]]
        units.append(UnitData([SequenceData([1] * (n + 1), tok)]))
    return pack(units)


@pytest.mark.parametrize("case", RECORDED["cases"])
def test_loss_and_gradient_are_those_of_trl(case):
    name, options = LOSSES[case]
    cls = Plugins.discover().resolve("loss", name).cls
    loss = cls(cls.Config(**options))
    if "kl" in case:
        loss = WithKL(loss, "k3", case == "unbiased-kl")
    differences = 0
    for record, plain in zip(RECORDED["cases"][case], RECORDED["cases"]["dapo"], strict=True):
        batch = weigh(loss.prepare(one_batch(record)), loss.reduce())
        logprobs = torch.tensor([v for row in record["logprobs"] for v in row], requires_grad=True)
        total, _ = evaluate(loss, batch, {"logprobs": logprobs}, {"kl": 0.3}, {})
        total.backward()
        expected = torch.tensor([v for row in record["gradient"] for v in row])
        assert float(total) == pytest.approx(record["loss"], rel=1e-5, abs=1e-6)
        assert (logprobs.grad - expected).norm() <= 1e-5 * expected.norm()
        differences += record["loss"] != plain["loss"]
    assert bool(differences) == (case != "dapo"), "the option shows"
