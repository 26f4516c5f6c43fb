"""Streamed weights have the names and shapes of the architecture's checkpoints, also if the module's differ."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import CheckpointError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_modeling.checkpoint_tensors import Published
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.models import model_path
from safetensors.torch import load_file

MODELS = {
    "qwen3": {"tied": False},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "tied": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tied": False},
}
EXPERT = {
    "qwen3_moe": "model.layers.1.mlp.experts.3.up_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w3.weight",
}


def trainer(architecture, seed=0, **options):
    path = model_path(architecture, seed=seed, **MODELS[architecture])
    spec = ModelSpec(RoleSpec("policy", trained=bool(options)), str(path), dtype="fp32")
    return TorchTrainer(TorchTrainer.Config(device="cpu", **options), spec)


def saved(architecture, seed=0):
    return load_file(model_path(architecture, seed=seed, **MODELS[architecture]) / "model.safetensors")


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 2}}], ids=["whole", "lora"])
def test_the_stream_is_the_checkpoint(architecture, options):
    source, want = trainer(architecture, **options), saved(architecture)
    assert architecture not in EXPERT or EXPERT[architecture] in want
    weights = dict(source.weights())
    assert equal(weights, want)
    assert list(dict(source.weights())) == list(weights)
    if options:
        assert equal(dict(source.weights("base")), want)


@pytest.mark.parametrize("architecture", MODELS)
def test_a_trainer_loads_its_own_weight_stream(architecture):
    source, other = trainer(architecture), trainer(architecture, seed=1)
    weights = saved(architecture)
    assert not equal(dict(other.weights()), weights)
    other.load_weights(source.weights())
    assert equal(dict(other.weights()), weights)
    assert equal(dict(other.module.named_parameters()), dict(source.module.named_parameters()))


@pytest.mark.parametrize("architecture", EXPERT)
def test_weights_of_another_model_are_refused_and_change_nothing(architecture):
    source = trainer(architecture)
    state = {name: tensor.clone() for name, tensor in source.module.state_dict().items()}
    weights = saved(architecture, seed=1)
    name = EXPERT[architecture]
    for wrong, message in (
        ({n: t for n, t in weights.items() if n != name}, rf"another model: missing \['{name}'\]"),
        (weights | {name: weights[name][:3]}, rf"'{name}' has shape \(3, 32\)"),
        (state, "is of another model: missing"),
    ):
        with pytest.raises(CheckpointError, match=message):
            source.load_weights(iter(wrong.items()))
        assert equal(dict(source.module.state_dict()), state)


def test_tensors_that_are_one_in_checkpoints_are_streamed_together(monkeypatch):
    """None of the tested architectures has such a module, but transformers has conversions of this kind."""

    def joined(module, tensors):
        rest = {n: t for n, t in tensors.items() if not n.startswith("part")}
        parts = [t for n, t in tensors.items() if n.startswith("part")]
        return rest | ({"whole": torch.cat(parts)} if parts else {})

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", joined)
    originals = {"part.a": torch.randn(2, 3), "middle": torch.randn(4), "part.b": torch.randn(1, 3)}
    converter = Published(None, {name: tensor.shape for name, tensor in originals.items()})  # type: ignore[arg-type]
    stream = dict(converter.stream(originals.items()))
    assert list(stream) == list(converter.shapes) == ["middle", "whole"]
    assert torch.equal(stream["whole"], torch.cat([originals["part.a"], originals["part.b"]]))
    assert equal(converter.restore(stream, "here"), originals)
