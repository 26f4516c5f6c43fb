"""One rank: weights that are stored in bf16, with fp32 masters in DeepSpeed's optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rlhf.errors import CapabilityError, ConfigError
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.suite_losses import TokenLoss
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file
from zero_cases import apart, batch, spec, trainer

STORED = {"dtype": "auto", "storage": "bf16"}
STAGES = [
    pytest.param({"stage": 2}, marks=pytest.mark.full),
    pytest.param({"stage": 2, "offload_optimizer": "cpu"}, marks=pytest.mark.full),
    {"stage": 3},
    pytest.param({"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}, marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "model", std=0.2)
    tiny_model(folder / "critic", std=0.2, head="scalar", tied=False)
    return folder


def masters(of):
    """[n] fp32: everything that the optimizer steps on this rank, by parameter."""
    return {
        piece.name: flat.data[piece.offset : piece.offset + piece.numel].clone()
        for flat in of.partition.flats
        for piece in flat.pieces
    }


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_steps_are_those_of_the_trainer_torch(folder, options):
    """Two micro-batches a step. Outputs are equal but for the kernels (stage 3 has transformers' own layers)."""
    of = trainer(spec(folder, **STORED), **options)
    alone = TorchTrainer(TorchTrainer.Config(lr=1e-3, device="cpu", kernels="none"), of.spec)
    other = TorchTrainer(TorchTrainer.Config(lr=1e-3, device="cpu"), of.spec)
    assert {t.dtype for _, t in of.weights()} == {torch.bfloat16}
    (got,), (want,) = (t.forward([batch(0)], ("logprobs",)) for t in (of, alone if options["stage"] == 3 else other))
    assert torch.equal(got["logprobs"], want["logprobs"])
    start = {name: p.detach().float().clone() for name, p in alone.stepped.items()}
    for number in range(3):
        for each in (of, alone, other):
            each.update([batch(number), batch(number + 10)], TokenLoss(), {}, {})
    theirs = (alone if options["stage"] == 3 else other).stepped
    steps = {name: p.detach().float().reshape(-1) - start[name].reshape(-1) for name, p in theirs.items()}
    ours = {name: m - start[name].reshape(-1) for name, m in masters(of).items()}
    assert apart(ours, steps) < 0.02  # AdamW's first steps depend on the sign of tiny gradients
    for name, weight in of.weights():
        assert torch.equal(weight.reshape(-1), masters(of)[name].bfloat16())


@pytest.mark.full
@pytest.mark.parametrize("options", STAGES, ids=str)
def test_steps_that_bf16_would_lose_add_up_in_the_masters(folder, options):
    of = trainer(spec(folder, **STORED), **{"lr": 1e-6, **options})
    name = "model.layers.0.mlp.up_proj.weight"
    start = {n: t.clone() for n, t in of.weights()}[name]
    found = []
    for _ in range(3):
        of.update([batch(0)], TokenLoss(), {}, {})
        found.append((masters(of)[name] - start.reshape(-1).float()).abs().mean().item())
    assert found[2] > 2 * found[0] > 1e-6
    assert int((dict(of.weights())[name] != start).sum()) < 0.05 * start.numel()


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_a_restart_continues_bit_for_bit(folder, tmp_path, options):
    def steps(of, numbers):
        return [of.update([batch(n), batch(n + 10)], TokenLoss(), {}, {}) for n in numbers]

    whole, first, second = (trainer(spec(folder, **STORED), **{"ema_decay": 0.9, **options}) for _ in range(3))
    results = steps(whole, range(4))
    steps(first, range(2))
    first.save(tmp_path)
    second.load(tmp_path)
    first.offload()
    first.reload()
    assert steps(second, range(2, 4)) == results[2:] == steps(first, range(2, 4))
    for other in (first, second):
        assert all(torch.equal(m, masters(other)[name]) for name, m in masters(whole).items())
        for view in ("live", "ema"):
            pairs = zip(whole.weights(view), other.weights(view), strict=True)
            assert all(torch.equal(a.clone(), b) for (_, a), (_, b) in pairs)
    with pytest.raises(ConfigError, match=r"'storage': 'bf16'.*'storage': 'fp32'"):
        trainer(spec(folder), **{"ema_decay": 0.9, **options}).load(tmp_path)


@pytest.mark.full
def test_another_stage_continues_with_the_same_masters(folder, tmp_path):
    one, other = (trainer(spec(folder, **STORED), stage=stage) for stage in (2, 3))
    one.update([batch(0)], TokenLoss(), {}, {})
    one.save(tmp_path)
    other.load(tmp_path)
    assert all(torch.equal(m, masters(other)[name]) for name, m in masters(one).items())
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one.weights(), other.weights(), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_muon_steps_the_masters(folder, stage):
    of = trainer(spec(folder, **STORED), stage=stage, optimizer="muon")
    alone = TorchTrainer(TorchTrainer.Config(lr=1e-3, device="cpu", optimizer="muon"), of.spec)
    for each in (of, alone):
        each.update([batch(0)], TokenLoss(), {}, {})
    theirs = {name: p.detach().reshape(-1) for name, p in alone.stepped.items()}
    assert apart(masters(of), theirs) < 1e-3


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_roles_in_bf16(folder, stage):
    role = {"trained": False, "head": "scalar", **STORED}
    of = trainer(spec(folder, **role), stage=stage)
    alone = TorchTrainer(TorchTrainer.Config(device="cpu", kernels="none" if stage == 3 else "auto"), of.spec)
    assert [t.dtype for _, t in of.weights()] == [torch.bfloat16] * len(list(of.weights()))
    got, want = (t.forward([batch(0)], ("values",))[0]["values"] for t in (of, alone))
    assert torch.equal(got, want)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_an_export_is_bf16_or_the_masters(folder, tmp_path, stage):
    for number, wanted in enumerate((torch.bfloat16, torch.float32)):
        of = trainer(spec(folder, **STORED), stage=stage, export_masters=bool(number), export_shard_bytes=20_000)
        of.update([batch(0)], TokenLoss(), {}, {})
        of.export(tmp_path / str(number))
        saved = {n: t for file in (tmp_path / str(number)).glob("*.safetensors") for n, t in load_file(file).items()}
        assert {t.dtype for t in saved.values()} == {wanted}
        assert all(torch.equal(saved[name].reshape(-1), m.to(wanted)) for name, m in masters(of).items())
        assert f'"dtype": "{str(wanted)[6:]}"' in Path(tmp_path / str(number) / "config.json").read_text()


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_that_would_add_gradients_in_bf16_are_refused(folder, stage):
    with pytest.raises(CapabilityError, match="needs stage 2 or 3, got stage"):
        trainer(spec(folder, **STORED), stage=stage)
