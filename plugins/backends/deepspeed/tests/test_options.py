"""Every option of training has the effect that it has in the trainer ``torch``. This trainer's own have an effect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rlhf.errors import CapabilityError
from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.suite_losses import TokenLoss
from rlhf_testing.tiny import tiny_model
from zero_cases import apart, batch, spec, trainer

pytestmark = pytest.mark.full

STEPS = 3
SHARED = {
    "warmup": {"warmup_steps": 2},
    "warmup_ratio": {"warmup_ratio": 0.3},
    "schedule": {"schedule": "linear"},
    "cosine": {"schedule": "cosine_with_min", "min_lr_ratio": 0.5},
    "wsd": {"schedule": "wsd", "decay_ratio": 1.0, "min_lr_ratio": 0.2},
    "neftune": {"neftune_alpha": 20.0},
    "betas": {"betas": (0.5, 0.6)},
    "eps": {"eps": 0.1},
    "weight_decay": {"weight_decay": 10.0},
    "max_grad_norm": {"max_grad_norm": 1e-3, "eps": 1e-3},
    "lora": {"lora": {"rank": 2}},
    "lora_alpha": {"lora": {"rank": 2, "alpha": 16}},
    "lora_targets": {"lora": {"rank": 2, "targets": ("q_proj",)}},
    "lora_dropout": {"lora": {"rank": 2, "dropout": 0.5}},
    "bf16": {"dtype": "bf16"},
    "head_fp32": {"dtype": "bf16", "head_fp32": False},
}
BASE = {name: {} for name in SHARED} | {
    "max_grad_norm": {"eps": 1e-3},
    "lora_alpha": SHARED["lora"],
    "lora_targets": SHARED["lora"],
    "lora_dropout": SHARED["lora"],
    "head_fp32": SHARED["bf16"],
}
"""The options of the run without the tested option."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "model", std=0.2)
    return folder


@pytest.fixture(scope="module")
def learnt(folder):
    """{name of the trainer, its options: weights after a few steps}."""
    cache = {}

    def weights(make, stage, dtype="fp32", **options):
        key = repr((make.__name__, stage, dtype, options))
        if key not in cache:
            policy = make(spec(folder, dtype=dtype), **({"stage": stage} if stage is not None else {}), **options)
            for number in range(STEPS):
                policy.update([batch(number)], TokenLoss(), {}, {})
            cache[key] = {name: tensor.clone() for name, tensor in policy.weights()}
        return cache[key]

    return weights


def plain(model_spec, **options):
    return TorchTrainer(TorchTrainer.Config(lr=1e-3, device="cpu", **options), model_spec)


@pytest.mark.parametrize(
    ("name", "stage"), [(n, s) for n, o in SHARED.items() for s in (2, 3) if s == 2 or o.get("dtype") != "bf16"]
)
def test_options_of_training(learnt, name, stage):
    """In bf16 only stage 2 is tested: the stages multiply in different orders, and their rounding differs as much as
    the effects of the options."""
    result, want, base = (
        learnt(trainer, stage, **SHARED[name]),
        learnt(plain, None, **SHARED[name]),
        learnt(plain, None, **BASE[name]),
    )
    moved = apart(want, base)
    assert moved > 1e-5, "the option does something"
    assert apart(result, want) < moved / 20


@pytest.mark.parametrize("options", [{"muon_lr": 1e-2}, {"muon_momentum": 0.5}], ids=["muon_lr", "muon_momentum"])
def test_the_options_of_muon_have_an_effect_in_both_stages(learnt, options):
    muon = {"optimizer": "muon"}
    moved = apart(learnt(trainer, 2, **muon, **options), learnt(trainer, 2, **muon))
    assert moved > 1e-4
    assert apart(learnt(trainer, 2, **muon, **options), learnt(trainer, 3, **muon, **options)) < moved / 20


def test_head_fp32_has_an_effect_under_stage_3(learnt):
    assert apart(learnt(trainer, 3, dtype="bf16"), learnt(trainer, 3, dtype="bf16", head_fp32=False)) > 1e-5


@pytest.mark.slow
def test_liger_kernels(tmp_path):
    """Also for modules with divided weights, and with gradient checkpointing."""
    pytest.importorskip("liger_kernel")
    script = str(Path(__file__).parent / "liger_zero.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    distances = json.loads(done.stdout.splitlines()[-1])
    assert list(distances) == ["2", "3"]
    assert max(distances.values()) < 1e-5


def test_kernels_that_are_not_available_are_refused_before_a_model_is_read(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(CapabilityError, match="Liger's kernels run on GPUs, but this role is on 'cpu'"):
        trainer(spec(tmp_path), stage=3, kernels="liger")
    with pytest.raises(
        ValueError, match="kernels = 'own' cannot be combined with stage 3: fused layers read weights without"
    ):
        DeepSpeedTrainerConfig(stage=3, kernels="own")


@pytest.mark.parametrize("options", [{"stage": 3}, {"tensor_parallel": 2}])
def test_quantised_layers_are_refused_where_weights_are_divided(options):
    [(name, value)] = options.items()
    with pytest.raises(
        ValueError, match=rf"lora.quantization cannot be combined with {name} = {value}: .* Use stage 0, 1 or"
    ):
        DeepSpeedTrainerConfig(**options, lora={"rank": 2, "quantization": "nf4"})
    with pytest.raises(
        ValueError, match=rf"[^.]quantization cannot be combined with {name} = {value}: .* Use stage 0, 1 or"
    ):
        DeepSpeedTrainerConfig(**options, quantization="nf4")


def test_shared_prefixes_can_be_switched_off_in_every_stage(folder):
    scores = []
    for switch in (True, False):
        policy = trainer(spec(folder), stage=2, shared_prefixes=switch)
        assert policy.facts().shares_prefixes is switch
        scores.append(policy.forward([batch(0)], ("logprobs",))[0]["logprobs"])
    torch.testing.assert_close(*scores)
