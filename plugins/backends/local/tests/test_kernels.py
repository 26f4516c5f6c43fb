"""``trainer.kernels``: the results of each choice, and refusals before a model is loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from rlhf.errors import CapabilityError, ModelError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_modeling import liger
from rlhf_modeling.fused import fuse_layers, restore_layers
from rlhf_modeling.kernels import check_kernels, use_kernels
from rlhf_modeling.option_checks import check_training
from rlhf_plugin_local.trainer import TorchTrainerConfig
from rlhf_testing.tiny import tiny_model

FOLDER = Path(__file__).parent
KINDS = {"qwen3": 7, "llama": 5, "mistral": 5, "gemma2": 7, "gemma3_text": 9, "qwen2": 5, "critic": 7, "adapters": 7}
"""{case: modules that call Liger's functions: norms, and one feed-forward and one attention in each layer}."""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Results of the cases, on CPU tensors in Triton's interpreter."""
    pytest.importorskip("liger_kernel")
    script, folder = str(FOLDER / "liger_cases.py"), str(tmp_path_factory.mktemp("liger"))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, folder], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_liger_gives_the_numbers_of_transformers_layers(interpreted, kind):
    result = interpreted[kind]
    assert result["bound"] == KINDS[kind]
    assert result.get("not bound", 0) == 0
    assert result["values"] < 1e-5
    assert result["gradients"] < 1e-4


def test_samples_of_layers_with_liger_have_the_log_probs_of_transformers_layers(interpreted):
    assert interpreted["sampled"] < 1e-5


def test_auto_takes_liger_under_bf16_where_it_is_available_and_knows_the_layers(make_trainer, monkeypatch):
    model, calls = make_trainer(kernels="none").loaded_model, []

    def use_liger(module):
        calls.append(module)
        if len(calls) > 1:
            raise CapabilityError("layers of another kind")
        return fuse_layers(module)

    monkeypatch.setattr(liger, "use_liger", use_liger)
    for available, bf16, expected in ((False, True, 0), (True, False, 0), (True, True, 1), (True, True, 2)):
        monkeypatch.setattr(liger, "why_not", lambda device, is_there=available: "" if is_there else "no GPU")
        use_kernels(model, "auto", bf16)
        assert len(calls) == expected
        layers = [m for m in model.module.modules() if "forward" in vars(m)]
        assert len(layers) == 2, "where it is not taken, the layers are those of `own`"
        restore_layers(layers)


def test_liger_is_refused_for_layers_that_it_does_not_compute(interpreted):
    messages = interpreted["refused"]
    assert "Olmo2ForCausalLM has 2 layers, but only 0 are of a supported kind (Gemma2, " in messages["olmo2"]
    assert "gates of Qwen3ForCausalLM use GELUActivation, but the kernel computes SiLU" in messages["gelu"]
    assert (
        "Qwen3ForCausalLM computes different results with Liger's kernels (hidden states differ by"
        in messages["differs"]
    )


def test_with_other_forms_in_place_of_liger_layers_are_compared_in_bf16_too(make_trainer, monkeypatch):
    model = make_trainer(kernels="none").loaded_model
    monkeypatch.setattr(liger, "use_liger", fuse_layers)
    use_kernels(model, "liger", bf16=True)
    assert sum("forward" in vars(m) for m in model.module.modules()) == 2

    def wrong_in_bf16(module):
        layers = fuse_layers(module)
        for layer in layers:
            layer.forward = partial(scaled, layer.forward)
        return layers

    def scaled(forward, *arguments, **options):
        return forward(*arguments, **options) * (1 + 0.1 * torch.is_autocast_enabled("cpu"))

    restore_layers([m for m in model.module.modules() if "forward" in vars(m)])
    monkeypatch.setattr(liger, "use_liger", wrong_in_bf16)
    use_kernels(model, "liger", bf16=False)
    restore_layers([m for m in model.module.modules() if "forward" in vars(m)])
    with pytest.raises(CapabilityError, match=r"computes different results .* norm-wise, in bf16"):
        use_kernels(model, "liger", bf16=True)


def test_liger_leaves_other_models_of_the_process_alone(interpreted):
    assert interpreted["others"] is True


def test_liger_is_refused_before_a_model_is_read(make_trainer, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        CapabilityError, match=r"Liger's kernels run on GPUs, but this role is on 'cpu'\. Remove the option"
    ):
        make_trainer("no folder", kernels="liger")
    with pytest.raises(ModelError):
        make_trainer("no folder", kernels="none")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match=r"liger-kernel is not installed: pip install liger-kernel"):
        check_kernels("liger", "cuda")
    assert liger.why_not("cpu").startswith("Liger's kernels run on GPUs")


@pytest.mark.parametrize(("kernels", "count"), [("auto", 2), ("own", 2), ("none", 0)])
def test_own_kernels_and_none(make_trainer, make_batch, nll, kernels, count):
    trainer = make_trainer(kernels=kernels)
    assert sum("forward" in vars(m) for m in trainer.module.modules()) == count
    [output], [want] = (
        instance.forward([make_batch([9, 4], loss=nll)], ["logprobs"]) for instance in (trainer, make_trainer())
    )
    assert torch.allclose(output["logprobs"], want["logprobs"], atol=1e-5)


def test_own_kernels_are_refused_where_they_do_not_fit(tmp_path, make_trainer):
    for name, options in (("gemma", {"architecture": "gemma3_text"}), ("dropout", {"attention_dropout": 0.1})):
        path = tiny_model(tmp_path / name, **options)
        with pytest.raises(CapabilityError, match=r"trainer\.kernels = 'own': not all layers of "):
            make_trainer(path, kernels="own")
        make_trainer(path)


def test_own_kernels_are_refused_before_the_model_is_loaded(tmp_path, model_path):
    def check(path):
        spec = ModelSpec(RoleSpec("policy", "lm", True), str(path), "fp32")
        check_training(TorchTrainerConfig(kernels="own"), spec, "cpu", None)

    check(model_path)
    with pytest.raises(CapabilityError, match=r"not all layers of Qwen3MoeForCausalLM can be fused"):
        check(tiny_model(tmp_path, architecture="qwen3_moe"))
