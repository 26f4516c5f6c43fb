"""Adapters: they start without effect, only they are trained, and weights and exports are merged."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import ConfigError, TrainingError
from rlhf.interfaces import GeneratorSpec, ModelSpec
from rlhf.interfaces.model import ADAPTER_PREFIX, ADAPTERS, PARTS
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf_modeling.adapters import add_adapters, linear
from rlhf_modeling.config import LoraOptions
from rlhf_modeling.fused import restore_layers
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.tiny_architectures import tiny_architecture

LORA = LoraOptions(rank=4)


def logprobs(trainer, batch, view="live"):
    [out] = trainer.forward([batch], ["logprobs"], view)
    return out["logprobs"]


@pytest.fixture
def trained(make_trainer, make_batch, nll):
    """A trainer with adapters after three steps, with its batch and its initial log-probs."""
    trainer, batch = make_trainer(lora=LORA, lr=0.02), make_batch([9, 30, 4], loss=nll)
    old_logprobs = logprobs(trainer, batch)
    for _ in range(3):
        trainer.update([batch], nll, {}, {})
    return trainer, batch, old_logprobs


def test_only_adapters_are_trained_and_the_base_stays(trained, make_trainer):
    trainer, batch, old_logprobs = trained
    plain = make_trainer(trained=False)
    assert torch.allclose(old_logprobs, logprobs(plain, batch), atol=1e-5)
    assert (logprobs(trainer, batch) - old_logprobs).abs().max() > 0.1
    assert torch.allclose(logprobs(trainer, batch, "base"), old_logprobs, atol=1e-5)
    assert trainer.views == ("live", "base")
    assert len(trainer.parameters) == 2 * 7 * 2  # A and B of seven layers in two blocks
    assert all(p.requires_grad == (n in trainer.parameters) for n, p in trainer.module.named_parameters())
    base = dict(plain.weights())
    assert all(torch.equal(t, base[n]) for n, t in trainer.weights("base"))
    assert not trainer.coverage()["unchanged"] or all("lora_A" in n for n in trainer.coverage()["unchanged"])


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_exports_are_one_merged_model(tmp_path, make_trainer, make_batch, nll, tied):
    trainer = make_trainer(tiny_model(tmp_path / "model", tied=tied), lora=LORA, lr=0.02)
    batch = make_batch([9, 30, 4], loss=nll)
    for _ in range(3):
        trainer.update([batch], nll, {}, {})
    merged = make_trainer(tmp_path / "model")
    merged.load_weights(trainer.weights())
    assert torch.allclose(logprobs(merged, batch), logprobs(trainer, batch), atol=1e-5)
    trainer.export(tmp_path / "export")
    AutoModelForCausalLM.from_pretrained(str(tmp_path / "export"))
    assert torch.equal(logprobs(make_trainer(tmp_path / "export"), batch), logprobs(merged, batch))


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_alone_are_those_of_the_export(tmp_path, make_trainer, make_batch, nll, rslora):
    """Names, values and scale: base + scaling x B A is the merged model."""
    lora = LoraOptions(rank=4, use_rslora=rslora)
    trainer, batch = make_trainer(lora=lora, lr=0.02), make_batch([9, 30, 4], loss=nll)
    trainer.update([batch], nll, {}, {})
    trainer.export(tmp_path / "export")
    adapters, live = dict(trainer.weights(ADAPTERS)), dict(trainer.weights())
    exported = load_file(tmp_path / "export" / "adapter" / "adapter_model.safetensors")
    assert adapters.keys() == exported.keys()
    assert all(torch.equal(adapters[name], exported[name]) for name in adapters)
    description = trainer.adapters(trainer.config, trainer.spec)
    assert (description.rank, description.scaling, description.merged_only) == (4, 4.0 if rslora else 2.0, "")
    assert set(description.layers) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for name, base in dict(trainer.weights(PARTS)).items():
        a, b = (f"{ADAPTER_PREFIX}{name.removesuffix('weight')}lora_{factor}.weight" for factor in "AB")
        if b in adapters:
            base = base + description.scaling * adapters[b] @ adapters[a]
        assert name in adapters or torch.allclose(base, live[name], atol=1e-6), name


def test_adapters_that_are_no_sum_beside_the_base_go_merged(tmp_path):
    spec = ModelSpec(RoleSpec("policy", trained=True), str(tiny_model(tmp_path / "model")))
    for options, message in (
        ({"use_dora": True}, "use_dora: the rows"),
        ({"modules_to_save": ("lm_head",)}, "modules_to_save: weights of the base change"),
        ({"vision": True}, "vision: engines take"),
    ):
        config = TorchTrainerConfig(lora=LoraOptions(rank=4, **options))
        assert message in TorchTrainer.adapters(config, spec).merged_only
    assert TorchTrainer.adapters(TorchTrainerConfig(), spec) is None


SPARSE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0], "head_dim": 8,
}  # fmt: skip


def test_a_mixture_with_a_dense_layer_gets_adapters_beside_linear_layers_only(tmp_path, make_trainer, make_batch, nll):
    """peft matches the dense layer's names also in the experts, which are slices of one tensor and get no adapter."""
    path = tiny_model(tmp_path / "model", architecture="qwen3_moe", **SPARSE)
    trainer, batch = make_trainer(path, lora=LORA, lr=0.02), make_batch([9, 30, 4], loss=nll)
    assert len(trainer.parameters) == 2 * (2 * 4 + 3)  # A and B: attention of two layers, the dense feed-forward
    assert not any("experts" in name for name in trainer.parameters)
    for _ in range(3):
        trainer.update([batch], nll, {}, {})
    merged = make_trainer(path)
    merged.load_weights(trainer.weights())
    assert torch.allclose(logprobs(merged, batch), logprobs(trainer, batch), atol=1e-5)


@pytest.mark.parametrize("targets", [None, ("gate_proj", "q_a_proj")])
def test_peft_adds_the_adapters_of_a_shared_expert_to_it_and_not_to_the_stacked_experts(
    tmp_path, make_trainer, make_batch, nll, targets
):
    import peft  # takes a second, for which a collection of tests need not wait

    path, ids = tmp_path / "model", torch.arange(3, 40)[None]
    tiny_architecture(path, "deepseek_v3")  # a dense layer, then experts with a shared one
    trainer, batch = make_trainer(path, lora=LoraOptions(rank=4, targets=targets), lr=0.05), make_batch([9], loss=nll)
    for _ in range(3):
        trainer.update([batch], nll, {}, {})
    trainer.export(tmp_path / "export")
    base, merged = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (path, tmp_path / "export"))
    with torch.no_grad():
        start, expected = base(ids).logits, merged(ids).logits
        by_peft = peft.PeftModel.from_pretrained(base, tmp_path / "export" / "adapter")
        torch.testing.assert_close(by_peft(ids).logits, expected, atol=1e-4, rtol=0)
    assert (start - expected).abs().max() > 0.1
    frozen = make_trainer(tmp_path / "export" / "adapter", trained=False)
    assert torch.allclose(logprobs(frozen, batch), logprobs(trainer, batch), atol=1e-5)


def test_a_model_without_linear_layers_is_refused(tmp_path, make_trainer):
    path = tiny_model(tmp_path / "model", architecture="gpt2")
    with pytest.raises(
        ConfigError, match=r"trainer\.lora: GPT2LMHeadModel has no linear layers, so it cannot have adapters"
    ):
        make_trainer(path, lora=LORA)


def test_a_checkpoint_holds_the_adapters_only(tmp_path, trained, make_trainer, nll):
    trainer, batch, _ = trained
    trainer.save(tmp_path)
    restart = make_trainer(lora=LORA, lr=0.02)
    restart.load(tmp_path)
    assert torch.equal(logprobs(restart, batch), logprobs(trainer, batch))
    for instance in (trainer, restart):
        instance.update([batch], nll, {}, {})
    assert torch.equal(logprobs(restart, batch), logprobs(trainer, batch))
    assert (tmp_path / "model.safetensors").stat().st_size < 40_000


@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")])
def test_fused_layers_with_adapters_compute_what_peft_computes(make_trainer, make_batch, nll, targets):
    """Outputs in every view, and gradients. After two steps B is no longer zero."""
    lora = LoraOptions(rank=4, alpha=12, targets=targets)
    trainer, batch = make_trainer(lora=lora, lr=0.02), make_batch([9, 30, 4], loss=nll)
    for _ in range(2):
        trainer.update([batch], nll, {}, {})
    layers = [m for m in trainer.module.modules() if "forward" in vars(m)]
    assert len(layers) == 2
    results = []
    for restore in (False, True):
        if restore:
            restore_layers(layers)
        values = [logprobs(trainer, batch, view) for view in ("live", "base")]
        trainer.accumulate([batch], nll, {}, {})
        results.append((values, trainer.gradients()))
        trainer.zero_grad()
    (values, gradients), (expected, other) = results
    assert (values[0] - values[1]).abs().max() > 0.1
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(values, expected, strict=True))
    assert gradients.keys() == other.keys()
    for name in gradients:
        assert (gradients[name] - other[name]).norm() <= 1e-5 * other[name].norm(), name


def test_the_generator_samples_with_the_adapters(trained):
    trainer, _, _ = trained
    generator = TransformersGenerator(None, GeneratorSpec((), str))
    generator.load(trainer, 3)
    prompt = (5, 6, 7)
    [(_, turn)] = generator.generate([GenerationRequest(prompt, 1, Sampling(8))])
    ids = torch.tensor([*prompt, *turn.ids])
    with torch.no_grad(), torch.random.fork_rng():
        from rlhf_modeling.attention import packed

        with packed([len(ids)]):
            logits = trainer.module(ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0]
    assert torch.allclose(torch.tensor(turn.logprobs), expected, atol=1e-5)


def test_a_fresh_head_is_trained_beside_the_adapters(make_trainer, make_batch, squares):
    trainer = make_trainer(head="scalar", lora=LORA)
    assert "score.weight" in trainer.parameters
    old_weight = trainer.loaded_model.head.weight.clone()
    trainer.update([make_batch([9, 5], loss=squares)], squares, {}, {})
    assert not torch.equal(trainer.loaded_model.head.weight, old_weight)


def test_unknown_targets_and_replaced_weights_are_refused(trained, make_trainer):
    with pytest.raises(ConfigError, match=r"no linear layer is called wq; allowed: down_proj, gate_proj"):
        make_trainer(lora=LoraOptions(rank=2, targets=("q_proj", "wq")))
    trainer, _, _ = trained
    with pytest.raises(TrainingError, match="trains adapters; its weights cannot be replaced"):
        trainer.load_weights(iter(()))
    assert len(make_trainer(lora=LoraOptions(rank=2, targets=("q_proj",))).parameters) == 4


def test_an_adapter_is_added_in_bf16_under_autocast():
    """W x = 1, and alpha / rank x B A x adds 1/256, 2/256 and -1/256. Above 1 numbers of bf16 are 1/128 apart, so the
    first sum is rounded to the even neighbour; below 1 they are 1/256 apart."""
    model = torch.nn.Sequential()
    model.add_module("q_proj", torch.nn.Linear(4, 3, bias=False))
    add_adapters(model, torch.nn.Linear(1, 1), LoraOptions(rank=2, alpha=1), seed=0)
    layer = model.q_proj
    with torch.no_grad():
        layer.base_layer.weight.fill_(0.25)
        layer.lora_A["default"].weight.fill_(0.25)
        layer.lora_B["default"].weight.copy_(torch.tensor([1.0, 2.0, -1.0])[:, None].expand(3, 2) / 256)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(layer, torch.ones(5, 4))
    assert y.dtype == torch.bfloat16
    assert y.tolist() == [[1.0, 1.0 + 1 / 128, 1.0 - 1 / 256]] * 5
    y.sum().backward()
    assert torch.equal(layer.lora_B["default"].weight.grad, torch.full((3, 2), 0.5 * 5))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
