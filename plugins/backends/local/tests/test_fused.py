"""Fused layers compute what transformers' own layers compute, in both directions."""

from __future__ import annotations

import pytest
import torch
from rlhf_modeling import fused
from rlhf_modeling.fused import fuse_layers, restore_layers
from rlhf_testing.tiny import tiny_model

SLIDING = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", {}),
        ("qwen3", SLIDING),
        ("llama", {}),
        ("llama", {"sliding_window": 6}),  # Llama does not read this option
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 6}),
    ],
)
def test_same_logprobs_and_gradients_as_the_original_layers(
    architecture, options, tmp_path, make_trainer, make_batch, nll
):
    trainer = make_trainer(tiny_model(tmp_path, architecture=architecture, **options))
    layers = [m for m in trainer.module.modules() if "forward" in vars(m)]
    assert len(layers) == 2
    batch = make_batch([9, 30, 4], loss=nll)
    results = []
    for restore in (False, True):
        if restore:
            restore_layers(layers)
        [out] = trainer.forward([batch], ["logprobs"])
        trainer.accumulate([batch], nll, {}, {})
        results.append((out["logprobs"], trainer.gradients()))
        trainer.zero_grad()
    (a, ga), (b, gb) = results
    assert (a - b).abs().max() < 1e-5
    for name in ga:
        assert (ga[name] - gb[name]).norm() <= 1e-5 * gb[name].norm(), name


def test_layers_with_dropout_or_of_unknown_classes_stay_as_they_are(tmp_path, make_trainer):
    for path, options in (("a", {"attention_dropout": 0.1}), ("b", {"architecture": "gemma3_text"})):
        trainer = make_trainer(tiny_model(tmp_path / path, **options))
        assert not [m for m in trainer.module.modules() if "forward" in vars(m)]


def test_a_fused_forward_that_differs_is_not_used(model_path, make_trainer, monkeypatch):
    monkeypatch.setattr(fused, "_norm", lambda norm, x, dtype: x)
    trainer = make_trainer(model_path)
    assert not [m for m in trainer.module.modules() if "forward" in vars(m)]


@pytest.mark.parametrize("weighted", [True, False])
def test_backward_passes_equal_finite_differences(weighted):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 4, generator=g).requires_grad_()
    w = torch.randn(4, generator=g).requires_grad_() if weighted else None
    angle = torch.randn(5, 2, generator=g).repeat(1, 2)
    inputs = (x, w) if weighted else (x,)

    def statement(x, w):
        z = x if w is None else x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
        half = torch.cat([-z[..., 2:], z[..., :2]], -1)
        return z * angle.cos()[:, None] + half * angle.sin()[:, None]

    def compute(x, w):
        return fused._NormRotary.apply(x, w, 1e-6, angle.cos(), angle.sin(), torch.float32)

    weight = torch.randn(5, 2, 4, generator=g)
    expected = torch.autograd.grad((statement(x, w) * weight).sum(), inputs)
    gradients = torch.autograd.grad((compute(x, w) * weight).sum(), inputs)
    assert torch.allclose(compute(x, w), statement(x, w), atol=1e-6)
    for a, b in zip(gradients, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_restoring_gives_back_the_original_layers(model_path, make_trainer):
    trainer = make_trainer(model_path)
    restore_layers([m for m in trainer.module.modules() if "forward" in vars(m)])
    layers = fuse_layers(trainer.module)
    restore_layers(layers)
    assert layers
    assert not [m for m in trainer.module.modules() if "forward" in vars(m)]
