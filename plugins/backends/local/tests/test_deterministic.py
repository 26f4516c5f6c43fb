"""``trainer.deterministic``: torch's deterministic algorithms, in the trainer's passes only."""

from __future__ import annotations

import os

import pytest
import torch
from rlhf.errors import CapabilityError
from rlhf.interfaces import ModelSpec
from rlhf.types import LossOutput, RoleSpec
from rlhf_modeling.option_checks import check_training
from rlhf_plugin_local import token_sampling
from rlhf_plugin_local.token_sampling import Draw, draw
from rlhf_plugin_local.trainer import TorchTrainerConfig

LENS = [6, 15, 9]


def modes(loss, monkeypatch):
    """Whether torch computes deterministically when the loss is computed, call by call."""
    flags, compute = [], type(loss).__call__

    def call(self, x):
        flags.append(torch.are_deterministic_algorithms_enabled())
        return compute(self, x)

    monkeypatch.setattr(type(loss), "__call__", call)
    return flags


@pytest.mark.parametrize("chosen", [True, False])
def test_passes_are_deterministic_with_the_option_and_torch_is_as_before(
    make_trainer, make_batch, nll, monkeypatch, chosen
):
    batch, flags = make_batch(LENS, loss=nll), modes(nll, monkeypatch)
    trainer = make_trainer(deterministic=chosen)
    trainer.accumulate([batch, batch], nll, {}, {})
    assert flags == [chosen, chosen]
    assert not torch.are_deterministic_algorithms_enabled()
    gradients = trainer.gradients()
    plain = make_trainer()
    plain.accumulate([batch, batch], nll, {}, {})
    assert all(torch.equal(gradients[name], value) for name, value in plain.gradients().items())
    logprobs, want = (t.forward([batch], ["logprobs"])[0]["logprobs"] for t in (trainer, plain))
    assert torch.equal(logprobs, want)


def test_an_operation_without_a_deterministic_form_is_refused_in_words(make_trainer, make_batch, nll, monkeypatch):
    def scattered(self, x):
        logp_A = x["logprobs"]
        first_A = torch.arange(len(logp_A))
        return LossOutput({"nll": -torch.zeros_like(logp_A).put(first_A, logp_A)})  # torch knows one form of it only

    monkeypatch.setattr(type(nll), "__call__", scattered)
    batch = make_batch(LENS, loss=nll)
    make_trainer().accumulate([batch], nll, {}, {})
    with pytest.raises(CapabilityError, match=r"trainer\.deterministic: .* needs put_, .* Remove the option"):
        make_trainer(deterministic=True).accumulate([batch], nll, {}, {})
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def check(model_path, monkeypatch):
    """Check the option as for a GPU, which torch is made to see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    spec = ModelSpec(RoleSpec("policy", trained=True), str(model_path), "bf16")
    return lambda **options: check_training(TorchTrainerConfig(**options), spec, "auto", "cuda")


def test_with_a_gpu_that_torch_is_made_to_see_the_workspace_of_cublas_is_set(check, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored after the test
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    check()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    check(deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_with_a_gpu_that_torch_is_made_to_see_another_workspace_of_cublas_is_refused(check, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    with pytest.raises(CapabilityError, match=r"CUBLAS_WORKSPACE_CONFIG = :4096:8 or :16:8 .* ':4096:2'"):
        check(deterministic=True)


@pytest.mark.parametrize("vocabulary", [40, 1500])
def test_with_tensors_that_claim_to_be_on_a_gpu_no_single_row_is_cumulated(monkeypatch, vocabulary):
    rows, cumsum = [], torch.Tensor.cumsum
    logits_BV = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(0))
    parameters = Draw(torch.ones(1), top_p_B=torch.tensor([0.9], dtype=torch.float64))
    want = draw(logits_BV, parameters, torch.tensor([0.7], dtype=torch.float64))

    def recording(tensor, *arguments, **options):
        rows.append(len(tensor))
        return cumsum(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.Tensor, "cumsum", recording)
    token_B, logp_B = token_sampling.draw(logits_BV, parameters, torch.tensor([0.7], dtype=torch.float64))
    assert rows
    assert set(rows) == {2}
    assert token_B.tolist() == want[0].tolist()
    assert logp_B.tolist() == want[1].tolist()
