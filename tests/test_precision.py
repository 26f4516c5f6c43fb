"""``dtype = "auto"`` depends on a measurement. One measurement serves all roles, ranks and resumes of a run. On a GPU
bf16 needs one that computes in it."""

from __future__ import annotations

import json

import pytest
import torch
from rlhf.errors import CapabilityError
from rlhf.interfaces import ModelSpec
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.types import RoleSpec, Sampling
from rlhf_modeling import precision
from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.option_checks import check_training
from rlhf_modeling.trainer import PackedTrainer
from rlhf_plugin_vllm import generator
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_plugin_vllm.platforms import Platform
from rlhf_testing.models import model_path

from tests.runs import Workshop


@pytest.fixture
def gain(monkeypatch):
    """Set the results of successive measurements of the processor's bf16."""
    gains = []
    monkeypatch.setattr(precision, "bf16_flags", lambda: ("amx_bf16",))
    monkeypatch.setattr(precision, "measured_gain", lambda: gains.pop(0))
    monkeypatch.setattr(precision, "_automatic", precision._automatic.__wrapped__)
    return gains


def test_one_measurement_serves_every_role_and_a_resume(shop: Workshop, gain, monkeypatch):
    computed = []
    prepare = PackedTrainer.prepare

    def recording(trainer, model, spec, device):
        prepare(trainer, model, spec, device)
        computed.append((spec.role.name, trainer.precision.name))

    monkeypatch.setattr(PackedTrainer, "prepare", recording)
    settings = {"policy": {"dtype": "auto"}, "algorithm": {"kl": {"coef": 0.1}}}
    gain[:] = [9.0] + 9 * [1.0]
    shop.train("grpo", "run", **settings, run={"steps": 1})
    assert computed == [("policy", "bf16"), ("reference", "bf16")]
    computed.clear()
    gain[:] = 9 * [1.0]
    done = shop.train("grpo", "run", "--resume", **settings, run={"steps": 2})
    assert computed == [("policy", "bf16"), ("reference", "bf16")]
    starts = json.loads((done.path / "manifest.json").read_text())["starts"]
    assert [start["on_processor"]["bf16"] for start in starts] == [True, True]
    assert "precision: bf16 on cpu: a matrix product in bf16 is 9.0 times as fast as in fp32 (amx_bf16)" in done.said


@pytest.fixture
def v100(monkeypatch):
    """A GPU that has no bf16 arithmetic, which torch emulates."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla V100")
    monkeypatch.setattr(precision, "_automatic", precision._automatic.__wrapped__)


def test_with_a_monkeypatched_capability_a_gpu_that_emulates_bf16_computes_in_fp32(v100):
    chosen = precision.choose_precision("auto", torch.device("cuda"))
    assert not chosen.bf16
    assert "Tesla V100 has compute capability 7.0" in chosen.note


@pytest.mark.parametrize(("option", "chosen"), [("dtype", {"dtype": "bf16"}), ("storage", {"storage": "bf16"})])
def test_with_a_monkeypatched_capability_bf16_is_refused_before_a_model_is_loaded(v100, option, chosen):
    spec = ModelSpec(RoleSpec("policy", trained=True), str(model_path()), **{"dtype": "auto", **chosen})
    with pytest.raises(CapabilityError, match=rf"{option} = 'bf16': Tesla V100 has compute capability 7\.0.*newer GPU"):
        check_training(TrainingConfig(), spec, "auto", "cuda")


def test_with_a_monkeypatched_capability_a_bf16_engine_is_refused_before_it_starts(v100, monkeypatch):
    monkeypatch.setattr(generator, "current_platform", lambda: Platform("cuda", "vllm 0.32.0", 1))
    spec = GeneratorSpec((1,), str, str(model_path()), "auto", max_tokens=64)
    VllmGenerator.check(VllmGenerator.Config(), spec, [Sampling(8)], "cuda")
    with pytest.raises(CapabilityError, match=r"dtype = 'bf16': Tesla V100"):
        VllmGenerator.check(VllmGenerator.Config(dtype="bf16"), spec, [Sampling(8)], "cuda")
