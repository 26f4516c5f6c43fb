"""One rank: weights that are stored in bf16. The optimizer steps fp32 masters, which are divided in their place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from fsdp_cases import trainer
from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces.memory import TrainerWork
from rlhf_plugin_fsdp.memory import storage
from rlhf_plugin_fsdp.trainer import FsdpTrainer
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_plugin_plan.model_size import read_size
from rlhf_testing.rank_batches import apart, batch, spec
from rlhf_testing.suite_losses import TokenLoss, ValueLoss
from rlhf_testing.tiny import tiny_model
from rlhf_testing.trainer_rank_cases import DORA
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

STORED = {"dtype": "auto", "storage": "bf16"}
MATRIX = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "model", std=0.2)
    tiny_model(folder / "critic", std=0.2, head="scalar", tied=False)
    return folder


def masters(of):
    """{name: [n] fp32}: what the optimizer steps."""
    return {piece.name: flat.data.clone() for flat in of.partition.flats for piece in flat.pieces}


def alone(of, **options):
    return TorchTrainer(TorchTrainer.Config(**{"lr": 1e-3, "device": "cpu", **options}), of)


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(o, marks=pytest.mark.full)
            for o in ({"optimizer": "muon"}, {"reshard_after_forward": False}, {"lora": {"rank": 4}}, {"lora": DORA})
        ),
    ],
    ids=str,
)
def test_steps_are_those_of_the_trainer_torch(folder, options):
    """Two micro-batches a step. Outputs, and gradients of the first step, are equal bit for bit; a sum of squares in
    another order changes the clipping in the last digit."""
    of = trainer(spec(folder, **STORED), **options)
    one = alone(of.spec, **{key: options[key] for key in ("optimizer", "lora") if key in options})
    assert {t.dtype for _, t in of.weights()} == {torch.bfloat16}
    (got,), (want,) = (t.forward([batch(0)], ("logprobs",)) for t in (of, one))
    assert torch.equal(got["logprobs"], want["logprobs"])
    for each in (of, one):
        each.accumulate([batch(0), batch(10)], TokenLoss(), {}, {})
    found, wanted = of.gradients(), one.gradients()
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    for each in (of, one):
        each.apply()
        each.update([batch(1), batch(11)], TokenLoss(), {}, {})
    theirs = {name: p.detach().reshape(-1) for name, p in one.stepped.items()}
    assert apart(masters(of), theirs) < 1e-6
    pairs = zip(of.weights(), one.weights(), strict=True)
    assert all(a == b and t.dtype == torch.bfloat16 and t.shape == u.shape for (a, t), (b, u) in pairs)


def test_steps_that_bf16_would_lose_add_up_in_the_masters(folder):
    """A weight of 0.2 has neighbours 1e-3 away in bf16; a step is at most 1e-6."""
    of = trainer(spec(folder, **STORED), lr=1e-6)
    start = {n: t.clone() for n, t in of.weights()}[MATRIX]
    found = []
    for _ in range(3):
        of.update([batch(0)], TokenLoss(), {}, {})
        found.append((masters(of)[MATRIX] - start.reshape(-1).float()).abs().mean().item())
    assert found[2] > 2 * found[0] > 1e-6
    assert int((dict(of.weights())[MATRIX] != start).sum()) < 0.05 * start.numel()
    assert of.coverage()["unchanged"] == []


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(o, marks=pytest.mark.full) for o in ({"optimizer": "muon"}, {"lora": DORA}))],
    ids=str,
)
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
        for view in whole.views:
            pairs = zip(whole.weights(view), other.weights(view), strict=True)
            assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    assert {t.dtype for t in load_file(tmp_path / "rank-0-of-1.safetensors").values()} == {torch.float32}
    with pytest.raises(ConfigError, match=r"'storage': 'bf16'.*'storage': 'fp32'"):
        trainer(spec(folder), **{"ema_decay": 0.9, **options}).load(tmp_path)


def test_the_average_is_of_the_masters(folder):
    """fp32, also where weights move by less than bf16's step; rounded where it is sent."""
    of = trainer(spec(folder, **STORED), ema_decay=0.5, lr=1e-6)
    at = next(i for i, flat in enumerate(of.partition.flats) if flat.names == [MATRIX])
    start = masters(of)[MATRIX]
    of.update([batch(0)], TokenLoss(), {}, {})
    after = masters(of)[MATRIX]
    assert torch.equal(of.average.tensors[at], start.lerp(after, 0.5))
    live, logprobs = {n: t.clone() for n, t in of.weights()}, of.forward([batch(0)], ("logprobs",))[0]["logprobs"]
    of.average.tensors[at].add_(1.0)
    average = dict(of.weights("ema"))[MATRIX]
    assert average.dtype == torch.bfloat16
    assert torch.equal(average.reshape(-1), (start.lerp(after, 0.5) + 1.0).bfloat16())
    assert not torch.equal(of.forward([batch(0)], ("logprobs",), "ema")[0]["logprobs"], logprobs)
    assert torch.equal(of.forward([batch(0)], ("logprobs",))[0]["logprobs"], logprobs)
    assert all(torch.equal(t, live[n]) for n, t in of.weights())
    assert torch.equal(masters(of)[MATRIX], after)


def test_weights_of_another_trainer_reach_the_masters(folder):
    of, other = trainer(spec(folder, **STORED)), trainer(spec(folder, **STORED), lr=1e-2)
    other.update([batch(0)], TokenLoss(), {}, {})
    sent = {name: tensor.clone() for name, tensor in other.weights()}
    of.load_weights(iter(sent.items()))
    assert all(torch.equal(masters(of)[name], tensor.float().reshape(-1)) for name, tensor in sent.items())
    (got,), (want,) = (t.forward([batch(1)], ("logprobs",)) for t in (of, other))
    assert torch.equal(got["logprobs"], want["logprobs"])


@pytest.mark.full
def test_a_lent_head_is_in_bf16(folder):
    of = trainer(spec(folder, **STORED))
    of.update([batch(0)], TokenLoss(), {}, {})
    (head,), sent = of.lend_head(), dict(of.weights())
    assert head.weight_VH.dtype == torch.bfloat16
    assert torch.equal(head.weight_VH, sent["model.embed_tokens.weight"])


def test_frozen_roles_in_bf16(folder):
    of = trainer(spec(folder, trained=False, head="scalar", **STORED))
    assert {p.dtype for p in of.parameters.values()} == {t.dtype for _, t in of.weights()} == {torch.bfloat16}
    got, want = (t.forward([batch(0)], ("values",))[0]["values"] for t in (of, alone(of.spec)))
    assert torch.equal(got, want)


@pytest.mark.full
def test_adapters_have_a_base_in_bf16(folder):
    """Adapters, and the head of a critic that is trained beside them, have masters; the base has none."""
    of = trainer(spec(folder, head="scalar", **STORED), lora={"rank": 4})
    one = alone(of.spec, lora={"rank": 4})
    for each in (of, one):
        for number in range(2):
            each.update([batch(number, ValueLoss())], ValueLoss(), {}, {})
    base = [p for name, p in of.module.named_parameters() if name not in of.parameters]
    assert {p.dtype for p in base} == {torch.bfloat16}
    assert {p.dtype for p in of.parameters.values()} == {torch.float32}
    assert of.tensors.rounded == of.parameters.keys()
    assert apart(masters(of), {name: p.detach().reshape(-1) for name, p in one.stepped.items()}) < 1e-6
    pairs = zip(of.weights(), one.weights(), strict=True)
    assert all(a == b and t.dtype == u.dtype == torch.bfloat16 for (a, t), (b, u) in pairs)


def test_a_model_that_keeps_some_weights_of_a_layer_in_fp32_is_refused(folder, monkeypatch):
    """FSDP gathers the trained weights of a layer in one number format."""
    monkeypatch.setattr(Qwen3PreTrainedModel, "_keep_in_fp32_modules_strict", {"q_norm"})
    with pytest.raises(CapabilityError, match=r"Qwen3DecoderLayer has 'self_attn.q_norm.weight' in fp32 beside '"):
        trainer(spec(folder, **STORED))
    assert trainer(spec(folder, trained=False, **STORED)).forward([batch(0)], ("logprobs",))


@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.full)], ids=["weights", "masters"])
def test_an_export_is_bf16_or_the_masters(folder, tmp_path, kept):
    of = trainer(spec(folder, **STORED), export_masters=kept, export_shard_bytes=20_000)
    of.update([batch(0)], TokenLoss(), {}, {})
    of.export(tmp_path)
    wanted = torch.float32 if kept else torch.bfloat16
    saved = {n: t for file in tmp_path.glob("*.safetensors") for n, t in load_file(file).items()}
    assert {t.dtype for t in saved.values()} == {wanted}
    assert all(torch.equal(saved[name].reshape(-1), m.to(wanted)) for name, m in masters(of).items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == wanted
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in saved.values())


def test_planned_memory(folder):
    """Of trained weights a rank keeps the masters only; a frozen role keeps bf16. What is gathered has half the
    bytes."""
    size, work = read_size(str(folder / "model")), TrainerWork(32, 32, 8, micro_tokens=64, annotated=())

    def held(trained: bool, stored: str):
        of = replace(spec(folder, trained=trained, dtype="bf16", storage=stored), world_size=4)
        return storage(FsdpTrainer.Config(), of, size, "cuda"), FsdpTrainer.memory(
            FsdpTrainer.Config(), of, size, work, "cuda"
        )

    (fp32, wide), (bf16, narrow) = held(True, "fp32"), held(True, "bf16")
    assert narrow.phases["rest"].device == wide.phases["rest"].device
    assert narrow.phases["rest"].device["weights"] == size.parameters * 4 // 4
    largest = max(size.layers[0].parameters, size.parameters - sum(x.parameters for x in size.layers))
    assert fp32.gathered - 8 * largest == 2 * (bf16.gathered - 6 * largest)
    (fp32, wide), (bf16, narrow) = held(False, "fp32"), held(False, "bf16")
    assert wide.phases["rest"].device["weights"] == 2 * narrow.phases["rest"].device["weights"]
    assert fp32.gathered == 2 * bf16.gathered
