"""Weights that are stored in bf16, with fp32 masters in the optimizer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rlhf.errors import ConfigError
from rlhf_modeling.masters import Masters
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """Models whose fp32 files hold numbers that bf16 represents exactly. Norms have weights of about 1."""

    def make(**options):
        path = tiny_model(tmp_path_factory.mktemp("rounded"), **options)
        file = path / "model.safetensors"
        tensors = {n: t + 0.1 * torch.randn(t.shape) if t.ndim == 1 else t for n, t in load_file(file).items()}
        save_file({name: t.bfloat16().float() for name, t in tensors.items()}, file, {"format": "pt"})
        return path

    return make


@pytest.fixture
def stored(make_trainer):
    def make(path=None, **options):
        arguments = () if path is None else (path,)
        return make_trainer(*arguments, **{"dtype": "auto", "storage": "bf16", **options})

    return make


def norm_apart(first, second):
    flat = [torch.cat([t[name].float().reshape(-1) for name in second]) for t in (first, second)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


VARIANTS = ({"kernels": "none"}, {"head_fp32": False}, {"head_fp32": "sums"})


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("options", [{}, *(pytest.param(options, marks=pytest.mark.full) for options in VARIANTS)])
def test_outputs_are_bit_equal_to_those_of_the_same_values_in_fp32(
    rounded, make_trainer, stored, make_batch, architecture, options
):
    """Autocast rounds fp32 weights in matrix products, where rounding changes nothing here; the rest is fp32."""
    path = rounded(architecture=architecture)
    batch = make_batch([9, 4, 20, 12])
    wide, narrow = make_trainer(path, dtype="bf16", **options), stored(path, **options)
    assert {p.dtype for p in narrow.module.parameters()} == {torch.bfloat16}
    assert narrow.loaded_model.layout == wide.loaded_model.layout == "shared"
    (want,), (outputs,) = (
        wide.forward([batch], ["logprobs", "entropy"]),
        narrow.forward([batch], ["logprobs", "entropy"]),
    )
    assert all(torch.equal(outputs[name], want[name]) for name in want)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"kernels": "none", "logits_chunk": 500}, marks=pytest.mark.full)]
)
def test_gradients_are_those_in_fp32_storage_rounded_once(rounded, make_trainer, stored, make_batch, nll, options):
    """One micro-batch: bf16 rounds each element by at most 2^-9 of itself, and a tied weight twice."""
    path, batch = rounded(), make_batch([9, 4, 20, 12], loss=nll)
    wide, narrow = make_trainer(path, dtype="bf16", **options), stored(path, **options)
    for trainer in (wide, narrow):
        trainer.accumulate([batch], nll, {}, {})
    assert norm_apart(narrow.gradients(), wide.gradients()) < 2**-8
    assert {g.dtype for g in narrow.gradients().values()} == {torch.float32}
    assert all(p.grad is None for p in narrow.parameters.values())


def test_micro_batches_add_their_gradients_in_fp32():
    """A sum of equal terms in bf16 would stop growing at 256 of them."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    masters = Masters({"weight": weight})
    for _ in range(400):
        weight.sum().backward()
    assert masters.stepped["weight"].grad.tolist() == [400.0] * 3
    assert weight.grad is None


@pytest.mark.full
def test_rows_of_the_embedding_add_their_gradients_in_fp32(rounded, make_trainer, stored, make_batch, nll):
    """Most tokens are the same, so one row gets hundreds of terms."""
    path = rounded(tied=False)
    batch = make_batch([600, 500], loss=nll)
    batch = replace(batch, ids_N=torch.where(batch.ids_N < 80, torch.full_like(batch.ids_N, 7), batch.ids_N))
    name, gradients = "model.embed_tokens.weight", []
    for trainer in (make_trainer(path, dtype="bf16"), stored(path)):
        trainer.accumulate([batch], nll, {}, {})
        gradients.append({name: trainer.gradients()[name]})
    assert norm_apart(gradients[1], gradients[0]) < 2**-8


def test_steps_that_bf16_would_lose_add_up_in_the_masters(rounded, make_trainer, stored, make_batch, nll):
    """A weight of 0.1 has neighbours 5e-4 away in bf16; a step is at most 2e-5."""
    path, batch = rounded(), make_batch([9, 14, 20], loss=nll)
    options = {"lr": 2e-5, "betas": (0.0, 0.99)}
    wide, narrow = make_trainer(path, dtype="bf16", **options), stored(path, **options)
    name = "model.layers.0.mlp.up_proj.weight"
    start = narrow.parameters[name].detach().clone()
    narrow.update([batch], nll, {}, {})
    wide.update([batch], nll, {}, {})
    count = int((narrow.parameters[name] != start).sum())
    assert count < 0.25 * start.numel(), "one step is lost for most weights in bf16"
    assert bool((narrow.stepped[name] != start.float()).all())
    for _ in range(29):
        narrow.update([batch], nll, {}, {})
        wide.update([batch], nll, {}, {})
    master, weight = narrow.stepped[name].detach(), narrow.parameters[name].detach()
    assert torch.equal(weight, master.bfloat16())
    assert int((weight != start).sum()) > 0.5 * start.numel()
    moved = wide.parameters[name].detach() - start.float()
    assert (
        float((master - start.float() - moved).norm() / moved.norm()) < 0.1
    )  # the paths' gradients differ by rounding
    assert narrow.coverage()["unchanged"] == []


@pytest.mark.parametrize(
    "options",
    [
        {"ema_decay": 0.9},
        *(pytest.param(o, marks=pytest.mark.full) for o in ({"optimizer": "muon"}, {"lora": {"rank": 2}})),
    ],
)
def test_a_restart_continues_bit_for_bit(tmp_path, stored, make_batch, nll, options):
    batches = [make_batch([5 + i, 20, 9, 3 * i + 3], seed=i, loss=nll) for i in range(6)]

    def steps(trainer, part):
        return [trainer.update([b.select([0, 1]), b.select([2, 3])], nll, {}, {}) for b in part]

    reference, first, second = (stored(**options) for _ in range(3))
    results = steps(reference, batches)
    steps(first, batches[:3])
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    assert all(torch.equal(p, second.parameters[name]) for name, p in first.parameters.items())
    assert steps(second, batches[3:]) == results[3:]
    for view in reference.views:
        pairs = zip(reference.weights(view), second.weights(view), strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    assert all(torch.equal(p, second.stepped[name]) for name, p in reference.stepped.items())
    assert {t.dtype for t in load_file(tmp_path / "state" / "model.safetensors").values()} == {torch.float32}


def test_a_checkpoint_of_another_storage_is_refused(tmp_path, make_trainer, stored):
    for number, (source, other) in enumerate(((stored(), make_trainer()), (make_trainer(), stored()))):
        source.save(tmp_path / str(number))
        with pytest.raises(ConfigError, match=r"saved with storage = (bf16|fp32); this run has storage = (bf16|fp32)"):
            other.load(tmp_path / str(number))


def test_a_checkpoint_that_names_no_storage_is_fp32(tmp_path, make_trainer, stored):
    make_trainer().save(tmp_path)
    facts = json.loads((tmp_path / "trainer.json").read_text())
    del facts["storage"]
    (tmp_path / "trainer.json").write_text(json.dumps(facts))
    make_trainer().load(tmp_path)
    with pytest.raises(ConfigError, match="storage = fp32"):
        stored().load(tmp_path)


def test_buckets_have_half_the_bytes(make_trainer, stored):
    sizes = [sum(bucket.nbytes for bucket in t.buckets()) for t in (make_trainer(), stored())]
    assert sizes[0] == 2 * sizes[1]


def test_an_export_is_bf16_or_the_masters(tmp_path, stored, make_batch, nll):
    for number, masters in enumerate((False, True)):
        trainer = stored(export_masters=masters, lr=1e-4)
        trainer.update([make_batch([9, 14], loss=nll)], nll, {}, {})
        trainer.export(tmp_path / str(number))
        weights = trainer.stepped if masters else trainer.parameters
        saved = load_file(tmp_path / str(number) / "model.safetensors")
        assert saved.keys() == weights.keys()
        assert all(torch.equal(saved[name], p) for name, p in weights.items())
        dtype = torch.float32 if masters else torch.bfloat16
        assert {t.dtype for t in saved.values()} == {dtype}
        assert AutoModelForCausalLM.from_pretrained(tmp_path / str(number), dtype="auto").dtype == dtype


def test_the_average_is_of_the_masters(stored, make_batch, nll):
    """fp32, also where weights move by less than bf16's step."""
    trainer, name = stored(ema_decay=0.5, lr=1e-6), "model.layers.0.mlp.up_proj.weight"
    start = trainer.stepped[name].detach().clone()
    trainer.update([make_batch([9, 14], loss=nll)], nll, {}, {})
    after = trainer.stepped[name].detach().clone()
    assert torch.equal(trainer.average.tensors[name], start.lerp(after, 0.5))
    live = {n: t.clone() for n, t in trainer.weights()}
    trainer.average.tensors[name].add_(1.0)
    average = dict(trainer.weights("ema"))[name]
    assert average.dtype == torch.bfloat16
    assert not torch.equal(average, live[name])
    assert all(torch.equal(t, live[n]) for n, t in trainer.weights())
    assert torch.equal(trainer.stepped[name], after)


def test_weights_of_another_trainer_reach_the_masters(stored, rounded, make_batch, nll):
    trainer, other = stored(), stored(rounded(seed=5), trained=False)
    trainer.load_weights(other.weights())
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(trainer.stepped[name], dict(other.weights())[name].float())
    trainer.update([make_batch([9, 14], loss=nll)], nll, {}, {})
    assert torch.equal(trainer.parameters[name], trainer.stepped[name].bfloat16())


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_a_frozen_role_holds_bf16_only(tmp_path, stored, make_trainer, make_batch, head):
    path = tiny_model(tmp_path, head=head)
    frozen = stored(path, head=head, trained=False)
    assert frozen.masters is None
    narrow, wide = (sum(t.nbytes for _, t in trainer.weights()) for trainer in (frozen, make_trainer(path, head)))
    assert 2 * narrow == wide
    output = {"lm": "logprobs", "scalar": "scores"}[head]
    assert frozen.forward([make_batch([9, 4])], [output])[0][output].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp32"}, "storage = 'bf16' and dtype = 'fp32'"),
        ({"storage": "fp8"}, "storage = 'fp8' is not known"),
        ({"kernels": "liger"}, "supports only fp32 weights of norms"),
        ({"storage": "fp32", "export_masters": True}, "is stored in fp32, so its fp32 weights are always exported"),
    ],
)
def test_what_cannot_be_done_is_refused(stored, options, message):
    with pytest.raises(ConfigError, match=message):
        stored(**options)
