"""Frozen layers in 4 or 8 bits, below adapters and in frozen roles, through bitsandbytes."""

from __future__ import annotations

import sys

import pytest
import torch
from rlhf.errors import ConfigError, TrainingError
from rlhf.interfaces import GeneratorSpec, ModelSpec
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf_modeling.config import LoraOptions
from rlhf_modeling.quantized import BYTES, QuantizedLinear
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.tiny import tiny_model

KINDS = ("nf4", "int8")


def check(model_path, **lora):
    spec = ModelSpec(RoleSpec("policy", "lm", True), str(model_path), "fp32")
    TorchTrainer.check(TorchTrainer.Config(lora={"rank": 2, **lora}), spec, "cpu")


def test_it_is_refused_without_bitsandbytes(model_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "bitsandbytes" or None)
    with pytest.raises(ConfigError, match=r"quantization = 'nf4' needs bitsandbytes: pip install bitsandbytes"):
        check(model_path, quantization="nf4")
    check(model_path)


def test_it_is_refused_where_bitsandbytes_cannot_quantise(model_path, monkeypatch):
    def fails():
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("rlhf_modeling.quantized._functional", fails)
    with pytest.raises(ConfigError, match=r"cannot quantise on cpu here \(RuntimeError: no kernel for this device\)"):
        check(model_path, quantization="int8")


def test_a_trained_role_is_refused_before_the_start(model_path):
    spec = ModelSpec(RoleSpec("policy", "lm", True), str(model_path), "fp32")
    with pytest.raises(ConfigError, match=r"quantization = 'int8': role 'policy' is trained.*lora\.quantization"):
        TorchTrainer.check(TorchTrainer.Config(quantization="int8"), spec, None)


class TestReal:
    """With the library itself."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def library(cls):
        pytest.importorskip("bitsandbytes")

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_layer_computes_with_its_dequantised_weight(self, kind):
        torch.manual_seed(0)
        linear = torch.nn.Linear(96, 40)
        layer = QuantizedLinear(linear, kind, torch.device("cpu"))
        x, y = (torch.randn(5, 96, requires_grad=True) for _ in range(2))
        y.data.copy_(x.data)
        error = (layer.weight - linear.weight).norm() / linear.weight.norm()
        assert 0 < error < {"nf4": 0.12, "int8": 0.02}[kind], "the format's rounding"
        assert torch.equal(layer.weight, layer.weight)
        output, want = layer(x), torch.nn.functional.linear(y, layer.weight, linear.bias)
        for value in (output, want):
            value.square().sum().backward()
        torch.testing.assert_close(output, want)
        torch.testing.assert_close(x.grad, y.grad)

    @pytest.mark.full
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dora", [False, True])
    def test_it_equals_training_over_the_dequantised_model(self, tmp_path, make_trainer, make_batch, nll, kind, dora):
        """The other trainer reads the exported base of the first one, and has no quantised layer."""
        options = {"rank": 4, "use_dora": dora, "modules_to_save": ("lm_head",)}
        path, batch = tiny_model(tmp_path / "model", tied=False), make_batch([9, 30, 4], loss=nll)
        quantized = make_trainer(path, lora=LoraOptions(quantization=kind, **options), lr=0.02)
        assert sum(isinstance(m, QuantizedLinear) for m in quantized.module.modules()) == 2 * 7
        quantized.export(tmp_path / "base", "base")
        other = make_trainer(tmp_path / "base", lora=LoraOptions(**options), lr=0.02)
        views = [
            [instance.forward([batch], ["logprobs"], v)[0]["logprobs"] for instance in (quantized, other)]
            for v in quantized.views
        ]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in views)
        original = make_trainer(path, trained=False).forward([batch], ["logprobs"])[0]["logprobs"]
        assert (views[0][0] - original).abs().max() > 1e-3, "the base is the quantised model"
        for _ in range(3):
            for instance in (quantized, other):
                instance.update([batch], nll, {}, {})
        weights = [dict(instance.weights()) for instance in (quantized, other)]
        assert weights[0].keys() == weights[1].keys() == dict(make_trainer(path).weights()).keys()
        for name, tensor in weights[0].items():
            torch.testing.assert_close(tensor, weights[1][name], atol=2e-4, rtol=0)  # Adam, of sums in another order

        merged = make_trainer(path)
        merged.load_weights(quantized.weights())
        scores = [instance.forward([batch], ["logprobs"])[0]["logprobs"] for instance in (quantized, merged)]
        assert torch.allclose(*scores, atol=1e-5), "what is exported and sampled from is what is trained"
        quantized.save(tmp_path / "saved")
        restart = make_trainer(path, lora=LoraOptions(quantization=kind, **options), lr=0.02)
        restart.load(tmp_path / "saved")
        assert torch.equal(restart.forward([batch], ["logprobs"])[0]["logprobs"], scores[0])

    @pytest.mark.full
    def test_the_generator_samples_from_the_quantised_module(self, make_trainer):
        trainer = make_trainer(lora=LoraOptions(rank=2, quantization="nf4"))
        generator = TransformersGenerator(None, GeneratorSpec((), str))
        generator.load(trainer, 1)
        [(_, turn)] = generator.generate([GenerationRequest((5, 6, 7), 1, Sampling(4))])
        assert len(turn.ids) == 4

    @pytest.mark.full
    def test_layers_stay_quantised_under_bf16_and_checkpointing(self, make_trainer, make_batch, nll):
        options = {"lora": LoraOptions(rank=4, quantization="nf4"), "lr": 0.02}
        batch = make_batch([9, 30, 4], loss=nll)
        gradients = []
        for settings in ({}, {"gradient_checkpointing": True}, {"dtype": "bf16"}, {"kernels": "none"}):
            trainer = make_trainer(**options, **settings)
            trainer.accumulate([batch], nll, {}, {})
            gradients.append(torch.cat([g.flatten() for g in trainer.gradients().values()]))
        for other, tolerance in zip(gradients[1:], (1e-5, 0.1, 1e-5), strict=True):
            assert (other - gradients[0]).norm() <= tolerance * gradients[0].norm()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "precision", [{"dtype": "fp32"}, pytest.param({"dtype": "bf16", "storage": "bf16"}, marks=pytest.mark.full)]
    )
    def test_a_frozen_role_computes_with_the_rounded_weights(self, make_trainer, make_batch, kind, precision):
        """A plain model whose weights are replaced by the dequantised ones gives the same numbers."""
        batch, precision = make_batch([9, 30, 4]), {"trained": False, **precision}
        frozen, plain = make_trainer(quantization=kind, **precision), make_trainer(**precision)
        layers = {n: m for n, m in frozen.module.named_modules() if isinstance(m, QuantizedLinear)}
        assert len(layers) == 2 * 7
        assert not isinstance(frozen.loaded_model.head, QuantizedLinear)
        outputs = ["logprobs", "entropy"]
        [old_outputs] = plain.forward([batch], outputs)
        for name, layer in layers.items():
            plain.module.get_submodule(name).weight.data.copy_(layer.weight)
        [want], [result] = plain.forward([batch], outputs), frozen.forward([batch], outputs)
        for name in outputs:
            torch.testing.assert_close(result[name], want[name], atol=1e-5, rtol=0)
        assert (old_outputs["logprobs"] - want["logprobs"]).abs().max() > 1e-3
        with pytest.raises(TrainingError, match="quantised weights cannot be replaced"):
            frozen.load_weights(plain.weights())

    @pytest.mark.parametrize("kind", KINDS)
    def test_bytes_per_weight(self, kind):
        layer = QuantizedLinear(torch.nn.Linear(512, 512, bias=False), kind, torch.device("cpu"))
        values, state = layer._values
        tensors = [values, state] if kind == "int8" else [values, state.absmax, state.state2.absmax]
        assert sum(t.numel() * t.element_size() for t in tensors) == pytest.approx(512 * 512 * BYTES[kind], rel=0.01)
