"""A run can be resumed in another ZeRO stage or with another number of ranks: its checkpoint depends on neither."""

from __future__ import annotations

import pytest

from tests.runs import require

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

require("deepspeed")


def test_a_run_is_resumed_in_another_zero_stage(shop):
    def train(output, stage, steps, resume=False, **trainer):
        options = {"use": "deepspeed", "stage": stage, "lr": 1e-2, "device": "cpu", "ema_decay": 0.9, **trainer}
        run = {"steps": steps, "resume": resume}
        return shop.train("sft", output, trainer=options, run=run, checkpoint={"every": 2}).lines()

    baseline = train("whole", 2, 4)
    train("changes", 2, 2)
    with pytest.raises(AssertionError, match=r"trainer\.lr: was 0\.01, now 0\.02"):
        train("changes", 3, 4, resume=True, lr=2e-2)
    lines = train("changes", 3, 4, resume=True, bucket=5000)
    assert len(lines) == len(baseline) == 4
    for expected, line in zip(baseline, lines, strict=True):
        assert line["policy/loss"] == pytest.approx(expected["policy/loss"], rel=1e-4)
        assert line["policy/grad_norm"] == pytest.approx(expected["policy/grad_norm"], rel=1e-3)
