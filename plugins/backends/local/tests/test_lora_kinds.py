"""rsLoRA, DoRA, and modules that are trained whole beside adapters: gradients, weights, the base, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from rlhf.errors import ConfigError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_modeling.adapters import is_adapter
from rlhf_modeling.config import LoraOptions
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.tiny import tiny_model
from torch.func import functional_call
from transformers import AutoModelForCausalLM

KINDS = {
    "rslora": LoraOptions(rank=4, alpha=3, use_rslora=True),
    "dora": LoraOptions(rank=4, alpha=12, use_dora=True, targets=("q_proj", "down_proj")),
    "saved": LoraOptions(rank=4, modules_to_save=("embed_tokens", "input_layernorm")),
    "all": LoraOptions(rank=4, use_rslora=True, use_dora=True, modules_to_save=("lm_head",)),
}


def plain_gradients(trainer, path, batch, lora):
    """Gradients of the mean negative log-prob under the loss mask, one sequence at a time through transformers. An
    adapted weight is m (W + s B A) / |W + s B A|, whose denominator is a constant, or W + s B A."""
    alpha = lora.alpha if lora.alpha is not None else 2 * lora.rank
    scale = alpha / math.sqrt(lora.rank) if lora.use_rslora else alpha / lora.rank
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    leaves = {n: p.detach().clone().requires_grad_() for n, p in trainer.parameters.items()}
    weights = dict(model.named_parameters()) | {n: p for n, p in leaves.items() if not is_adapter(n)}
    for name in list(weights):
        owner = name.removesuffix(".weight")
        if (a := leaves.get(f"{owner}.lora_A.default.weight")) is None:
            continue
        weight = weights[name] + scale * leaves[f"{owner}.lora_B.default.weight"] @ a
        if lora.use_dora:
            length = leaves[f"{owner}.lora_magnitude_vector.default.weight"]
            weight = length[:, None] * weight / weight.detach().norm(dim=1, keepdim=True)
        weights[name] = weight
    terms = []
    for ids, mask in zip(
        batch.ids_N.split(batch.lens_B.tolist()), batch.tok["loss_mask"].split(batch.lens_B.tolist()), strict=True
    ):
        logits = functional_call(model, weights, (ids[None],), {"use_cache": False}).logits[0]
        terms.append(-logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0][mask[1:]])
    torch.cat(terms).mean().backward()
    return {name: leaf.grad for name, leaf in leaves.items()}


def logprobs(trainer, batch, view="live"):
    [out] = trainer.forward([batch], ["logprobs"], view)
    return out["logprobs"]


def _adapted(lora, name):
    return lora.targets is None or name.split(".")[-2] in lora.targets


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [k if k == "all" else pytest.param(k, marks=pytest.mark.full) for k in KINDS])
def test_gradients_weights_and_the_base(tmp_path, make_trainer, make_batch, nll, kind, tied):
    """After two steps, B is no longer zero. Tolerances: fp32 sums in another order."""
    lora, path = KINDS[kind], tiny_model(tmp_path / "model", tied=tied)
    trainer, batch = make_trainer(path, lora=lora, lr=0.02), make_batch([9, 30, 4], loss=nll)
    plain = make_trainer(path, trained=False)
    assert torch.allclose(logprobs(trainer, batch), logprobs(plain, batch), atol=1e-5), "no effect at first"
    for _ in range(2):
        trainer.update([batch], nll, {}, {})
    trainer.accumulate([batch], nll, {}, {})
    gradients, want = trainer.gradients(), plain_gradients(trainer, path, batch, lora)
    assert gradients.keys() == want.keys()
    for name, gradient in want.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
        assert gradient.any(), name
    trainer.zero_grad()

    live, first = logprobs(trainer, batch), logprobs(plain, batch)
    assert (live - first).abs().max() > 0.1
    assert torch.allclose(logprobs(trainer, batch, "base"), first, atol=1e-5)
    assert torch.equal(logprobs(trainer, batch), live), "the base left no trace"
    base = dict(plain.weights())
    assert all(torch.equal(t, base[n]) for n, t in trainer.weights("base"))
    differences = {n for n, t in trainer.weights() if not torch.equal(t, base[n])}
    embedding = {"lm_head": "embed_tokens"} if tied else {}
    saved = [embedding.get(name, name) for name in lora.modules_to_save or ()]
    assert differences == {n for n in base if ("_proj" in n and _adapted(lora, n)) or n.split(".")[-2] in saved}

    merged = make_trainer(path)
    merged.load_weights(trainer.weights())
    assert torch.allclose(logprobs(merged, batch), live, atol=1e-5)
    trainer.export(tmp_path / "export")
    exported = make_trainer(tmp_path / "export")
    assert torch.equal(logprobs(exported, batch), logprobs(merged, batch))
    trainer.export(tmp_path / "export-base", "base")
    assert torch.equal(logprobs(make_trainer(tmp_path / "export-base"), batch), first)


def test_a_resumed_run_goes_on_with_the_same_numbers(tmp_path, make_trainer, make_batch, nll):
    options = {"lora": KINDS["all"], "lr": 0.02, "ema_decay": 0.9}
    trainer, batch = make_trainer(**options), make_batch([9, 30, 4], loss=nll)
    first = logprobs(trainer, batch, "base")
    for _ in range(3):
        trainer.update([batch], nll, {}, {})
    trainer.save(tmp_path)
    restart = make_trainer(**options)
    restart.load(tmp_path)
    for instance in (trainer, restart):
        instance.update([batch], nll, {}, {})
    for view in ("live", "ema"):
        assert torch.equal(logprobs(restart, batch, view), logprobs(trainer, batch, view))
    assert torch.allclose(logprobs(restart, batch, "base"), first, atol=1e-5), "the base is not what was loaded"


def test_the_lent_head_of_the_base_is_not_trained(tmp_path, make_trainer, make_batch, nll):
    lora = LoraOptions(rank=2, modules_to_save=("lm_head",))
    trainer, batch = make_trainer(tiny_model(tmp_path, tied=False), lora=lora, lr=0.02), make_batch([9], loss=nll)
    [head] = trainer.lend_head("base")
    old_weight = head.weight_VH.clone()
    trainer.update([batch], nll, {}, {})
    assert torch.equal(head.weight_VH, old_weight)
    assert not torch.equal(trainer.loaded_model.head.weight, old_weight)


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        ("lm", {"modules_to_save": ("lm_heads",)}, r"no module is called lm_heads; allowed: down_proj, embed_tokens"),
        ("lm", {"modules_to_save": ("q_proj",)}, r"q_proj would be fully trained, but \S*q_proj gets an adapter"),
        ("lm", {"modules_to_save": ("mlp",)}, r"layers\.0\.mlp would be fully trained, but \S*mlp.\w+ gets an adapter"),
        ("scalar", {"modules_to_save": ("score",)}, r"no module is called score; .* own head is always trained"),
        ("scalar", {"modules_to_save": ("lm_head",)}, r"no module is called lm_head; .* own head is always trained"),
    ],
)
def test_modules_that_cannot_be_saved_are_refused_before_the_model_is_loaded(model_path, head, options, message):
    config = TorchTrainer.Config(lora={"rank": 2, **options})
    with pytest.raises(ConfigError, match=r"trainer\.lora\.modules_to_save: .*" + message):
        TorchTrainer.check(config, ModelSpec(RoleSpec("policy", head, True), str(model_path), "fp32"), None)


def test_a_layer_without_an_adapter_may_be_trained_whole(make_trainer, make_batch, nll):
    lora = LoraOptions(rank=2, targets=("q_proj",), modules_to_save=("mlp", "norm"))
    trainer, batch = make_trainer(lora=lora), make_batch([9], loss=nll)
    names = [n for n in trainer.parameters if not is_adapter(n)]
    assert len(names) == 2 * 3 + 1
    trainer.update([batch], nll, {}, {})
    assert not set(trainer.coverage()["unchanged"]) & set(names)


@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_weights_that_are_stored_in_bf16(tmp_path, make_trainer, make_batch, nll, quantization):
    """The base is exact. The merged model is rounded to bf16 once more, which is less than 3 % of what was learnt."""
    if quantization is not None:
        pytest.importorskip("bitsandbytes")
    lora = KINDS["all"].model_copy(update={"quantization": quantization})
    path, batch = tiny_model(tmp_path / "model", tied=False), make_batch([9, 30, 4], loss=nll)
    trainer = make_trainer(path, lora=lora, lr=0.02, storage="bf16", dtype="bf16")
    first, base = logprobs(trainer, batch), {n: t.clone() for n, t in trainer.weights("base")}
    for _ in range(3):
        trainer.update([batch], nll, {}, {})
    assert torch.equal(logprobs(trainer, batch, "base"), first)
    assert all(torch.equal(t, base[n]) for n, t in trainer.weights("base"))
    merged = make_trainer(path, storage="bf16", dtype="bf16")
    merged.load_weights(trainer.weights())
    live = logprobs(trainer, batch)
    assert (logprobs(merged, batch) - live).norm() <= 3e-2 * (live - first).norm()
    assert {t.dtype for _, t in trainer.weights()} == {torch.bfloat16}
    trainer.save(tmp_path / "saved")
    restart = make_trainer(path, lora=lora, lr=0.02, storage="bf16", dtype="bf16")
    restart.load(tmp_path / "saved")
    assert torch.equal(logprobs(restart, batch), live)
