"""``optimizer = "muon"`` takes the steps of torch's Muon and AdamW, each for its parameters."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from rlhf.errors import ConfigError
from rlhf_plugin_local.trainer import TorchTrainerConfig

MATRICES = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "down_proj.weight",
)
OPTIONS = {
    "optimizer": "muon",
    "lr": 1e-3,
    "muon_lr": 4e-3,
    "muon_momentum": 0.8,
    "weight_decay": 0.1,
    "warmup_steps": 4,
}


@pytest.fixture
def make_muon(make_trainer):
    return lambda **options: make_trainer(**OPTIONS, **options)


def test_muon_steps_equal_those_of_torch(make_muon, make_batch, nll):
    trainer, reference = make_muon(max_grad_norm=1e9), make_muon(max_grad_norm=1e9)
    chosen = {n: p for n, p in reference.parameters.items() if n.endswith(MATRICES)}
    assert len(chosen) == 7 * reference.module.config.num_hidden_layers
    rest = {n: p for n, p in reference.parameters.items() if n not in chosen}
    assert {p.ndim for p in rest.values()} == {1, 2}, "norms, and the embedding"
    muon = torch.optim.Muon(chosen.values(), momentum=0.8, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest.values() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in rest.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    for step in range(3):
        with torch.no_grad():  # Muon rounds to bf16, which would enlarge what AdamW's kernels round otherwise
            for name, p in reference.parameters.items():
                p.copy_(trainer.parameters[name])
        reference.accumulate([make_batch((9, 5), step, nll)], nll, {}, {})
        for optimizer, peak in ((muon, 4e-3), (adamw, 1e-3)):
            for group in optimizer.param_groups:
                group["lr"] = peak * (step + 1) / 5
            optimizer.step()
        reference.zero_grad()
        _, result = trainer.update([make_batch((9, 5), step, nll)], nll, {}, {})
        assert result.lr == pytest.approx(1e-3 * (step + 1) / 5)
        for name, p in trainer.parameters.items():
            torch.testing.assert_close(p, reference.parameters[name], atol=1e-7, rtol=1e-5)


def test_a_resumed_muon_run_is_bit_equal(make_muon, make_batch, nll, tmp_path):
    source, other = make_muon(), make_muon()
    for step in range(2):
        source.update([make_batch((9, 5), step, nll)], nll, {}, {})
    source.save(tmp_path)
    other.load(tmp_path)
    for trainer in (source, other):
        trainer.update([make_batch((9, 5), 2, nll)], nll, {}, {})
    assert all(torch.equal(p, other.parameters[n]) for n, p in source.parameters.items())


def test_another_optimizer_is_refused(make_muon, make_trainer, tmp_path):
    make_muon().save(tmp_path)
    with pytest.raises(ConfigError, match="was saved with optimizer = muon; this run has optimizer = adamw"):
        make_trainer().load(tmp_path)


@pytest.mark.parametrize(("option", "value"), [("muon_lr", 0.1), ("muon_momentum", 0.9)])
def test_options_without_effect_are_refused(option, value):
    with pytest.raises(ValidationError, match=f"{option} = {value} has no effect with optimizer = 'adamw'"):
        TorchTrainerConfig(**{option: value})
