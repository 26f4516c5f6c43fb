"""``dtype = "auto"`` depends on a measurement. One measurement serves all roles, ranks and resumes of a run."""

from __future__ import annotations

import json

import pytest
from rlhf_modeling import precision
from rlhf_modeling.trainer import PackedTrainer

from tests.runs import Workshop


@pytest.fixture
def gain(monkeypatch):
    """Set the results of successive measurements of the processor's bf16."""
    gains = []
    monkeypatch.setattr(precision, "bf16_flags", lambda: ("amx_bf16",))
    monkeypatch.setattr(precision, "measured_gain", lambda: gains.pop(0))
    monkeypatch.setattr(precision, "_automatic", precision._automatic.__wrapped__)
    return gains


def test_one_measurement_serves_every_role_and_a_resume(shop: Workshop, gain, monkeypatch):
    computed = []
    prepare = PackedTrainer.prepare

    def recording(trainer, loaded, spec, device):
        prepare(trainer, loaded, spec, device)
        computed.append((spec.role.name, trainer.precision.name))

    monkeypatch.setattr(PackedTrainer, "prepare", recording)
    own = {"policy": {"dtype": "auto"}, "algorithm": {"kl": {"coef": 0.1}}}
    gain[:] = [9.0] + 9 * [1.0]
    shop.train("grpo", "run", **own, run={"steps": 1})
    assert computed == [("policy", "bf16"), ("reference", "bf16")]
    computed.clear()
    gain[:] = 9 * [1.0]
    done = shop.train("grpo", "run", "--resume", **own, run={"steps": 2})
    assert computed == [("policy", "bf16"), ("reference", "bf16")]
    starts = json.loads((done.path / "manifest.json").read_text())["starts"]
    assert [start["on_processor"]["bf16"] for start in starts] == [True, True]
    assert "precision: bf16 on cpu: a matrix product in bf16 is 9.0 times as fast as in fp32 (amx_bf16)" in done.said
