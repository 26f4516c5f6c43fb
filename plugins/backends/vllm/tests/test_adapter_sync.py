"""Adapters alone in a real engine: the base and its adapters compute what the trainer does, and faults are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlhf.errors import CapabilityError, ConfigError, SyncError
from rlhf.interfaces import GeneratorSpec, ModelSpec
from rlhf.interfaces.model import ADAPTERS, PARTS
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf.weights.bucket import Bucket
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_testing.models import model_path

from plugins.backends.vllm.tests.test_sync import Setup

CASES = {
    "all layers, rsLoRA": ("qwen3", {}, {"rank": 4, "use_rslora": True}),
    "parts of packed layers": ("llama", {"tied": False}, {"rank": 8, "targets": ("q_proj", "v_proj", "up_proj")}),
}
OPTIONS = {"parts of packed layers": {"speculative": {"method": "ngram", "prompt_lookup_min": 1}}}


class AdapterSetup(Setup):
    """A role that trains adapters, an engine for them, and the controller's sync between the two."""

    def __init__(self, case, **options):
        architecture, sizes, lora = CASES[case]
        self.path = str(model_path(architecture, head_dim=32, layers=2, **sizes))
        spec = ModelSpec(RoleSpec("policy", trained=True), self.path, "fp32")
        config = TorchTrainerConfig(lr=0.02, device="cpu", lora=lora)
        adapters = TorchTrainer.adapters(config, spec)
        options = VllmGeneratorConfig(kv_cache_gib=0.0625, max_sequences=64, **options)
        engine = GeneratorSpec((1,), str, self.path, "fp32", max_tokens=256, adapters=adapters)
        self.generator = VllmGenerator(options, engine)
        self.role = Role(spec, LocalLauncher(None).launch_trainer(TorchTrainer, config, spec), 1000)
        self.lost = lambda bucket: bucket
        take = self.generator.take
        self.generator.take = lambda bucket: take(self.lost(bucket))
        self.weights = self.sync()

    def sync(self, **section):
        return WeightSync(self.role, self.generator, SyncSection(**section), 0, print, adapters=True)


@pytest.fixture(scope="module")
def setups():
    cache = {}

    def get(case="all layers, rsLoRA"):
        if case not in cache:
            cache[case] = AdapterSetup(case, **OPTIONS.get(case, {}))
        setup = cache[case]
        setup.lost = lambda bucket: bucket
        setup.weights.push(0)
        return setup

    yield get
    for setup in cache.values():
        setup.generator.close()


@pytest.mark.parametrize("case", CASES)
def test_the_base_and_its_adapters_compute_what_the_trainer_does(setups, case):
    setup = setups(case)
    setup.update(3)
    assert setup.apart() > 0.1
    proofs, _ = setup.weights._send(setup.generator, 1)
    adapters = {name: t.nbytes for name, t in setup.role.group.worker.weights(ADAPTERS)}
    assert (proofs[0].received.keys(), proofs[0].nbytes) == (adapters.keys(), sum(adapters.values()))
    assert all(name.startswith("base_model.model.model.layers.") for name in adapters)
    assert setup.apart() < 1e-5
    assert setup.weights.push(2)["sync/canary"] < 1e-5
    requests = [GenerationRequest((20, 21, 22 + n), n, Sampling(20, 1.0, ignore_eos=True)) for n in range(4)]
    for n, turn in setup.generator.generate(requests):
        expected = setup.logprobs([[*requests[n].ids, *turn.ids]])[0][-len(turn.ids) :]
        assert float((expected - torch.tensor(turn.logprobs)).abs().max()) < 1e-5


def test_a_base_that_arrives_again_replaces_the_first(setups):
    setup = setups()
    setup.update(1)
    setup.weights.refresh()
    assert setup.apart() < 1e-5
    assert [n for b in setup.role.group.worker.buckets(PARTS) for n in setup.generator.stale(b)] == []


B = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"


def change(bucket, names, transform):
    return Bucket(tuple((n, transform(t.clone()) if n in names else t) for n, t in bucket.tensors), bucket.fingerprints)


def test_faults_on_the_way_are_named_and_the_next_sync_brings_the_base_too(setups):
    setup = setups()
    setup.update(1)

    def withhold(bucket):
        pairs = [(t, m) for t, m in zip(bucket.tensors, bucket.fingerprints, strict=True) if t[0] != B]
        return Bucket(tuple(t for t, _ in pairs), tuple(m for _, m in pairs))

    setup.lost = withhold
    with pytest.raises(SyncError, match=r"lora_B of model\.layers\.1\.self_attn\.k_proj did not arrive"):
        setup.weights.push(1)
    setup.lost = lambda bucket: change(bucket, [B], lambda t: t + 0.1)
    with pytest.raises(SyncError, match=f"received other values of {B}"):
        setup.sync(canaries=0).push(1)
    setup.lost = lambda bucket: bucket
    assert setup.weights.push(1)["sync/MiB"] > setup.weights.push(1)["sync/MiB"]
    assert setup.apart() < 1e-5


def test_adapters_that_arrive_and_are_not_used_fail_the_canary_and_are_named(setups, monkeypatch):
    from rlhf_plugin_vllm.worker.adapters import AdapterLoads  # imports vLLM, which takes seconds

    setup = setups()
    setup.update(2)
    monkeypatch.setattr(AdapterLoads, "_install", lambda self: None)
    with pytest.raises(SyncError, match=r"canaries differ .* Stale in the generator: base_model\.model\.model\.layers"):
        setup.weights.push(1)


def test_adapters_without_their_base_or_of_another_one_are_refused(setups):
    setup = setups()
    worker = setup.role.group.worker
    [bucket] = worker.buckets(ADAPTERS)
    loads = setup.generator.engine._llm.engine_core.engine_core.model_executor.driver_worker.worker._rlhf_adapters
    loads.has_base, has_base = False, loads.has_base
    setup.generator.begin_load(1)
    setup.generator.take(bucket)
    with pytest.raises(SyncError, match="the weights of the base did not arrive"):
        setup.generator.end_load()
    loads.has_base = has_base
    deeper = tuple((name.replace("layers.1", "layers.7"), tensor) for name, tensor in bucket.tensors)
    narrower = tuple((name, t[:, :2] if "lora_A" in name else t) for name, t in bucket.tensors)
    setup.generator.begin_load(1)
    with pytest.raises(SyncError, match=r"has no layer 'model\.layers\.7.*sync\.adapters = 'merged'"):
        setup.generator.take(Bucket(deeper, bucket.fingerprints))
    setup.generator.begin_load(1)
    setup.generator.take(Bucket(narrower, bucket.fingerprints))
    with pytest.raises(SyncError, match=r"takes \(4, 32\).*adapter of another base"):
        setup.generator.end_load()


def test_a_sample_goes_on_with_the_adapters_that_come(setups):
    setup = setups()
    request = GenerationRequest((20, 21, 22), 5, Sampling(60, 1.0, ignore_eos=True))
    assert setup.generator.advance({0: request}) == []
    setup.update(1)
    setup.weights.push(1)
    turns = setup.generator.advance({}, seconds=60.0)
    assert [version for _, version in turns[0][1].versions] == [0, 1]
    count = turns[0][1].versions[1][0]
    expected = setup.logprobs([[*request.ids, *turns[0][1].ids]])[0][len(request.ids) - 1 :]
    assert float((expected[count:] - torch.tensor(turns[0][1].logprobs)[count:]).abs().max()) < 1e-5


def test_the_base_answers_beside_the_policy_and_reads_no_keys_of_it(setups):
    """The prompt fills blocks of the cache. One of the samples goes on while adapters are loaded."""
    setup = setups()
    setup.update(1)
    setup.weights.push(1)
    prompt = [3 + 7 * n % 80 for n in range(180)]
    policy = GenerationRequest(prompt, 5, Sampling(40, 0.0, ignore_eos=True))
    base, other_base = replace(policy, base=True), replace(policy, base=True, seed=6)
    [(_, first)] = setup.generator.generate([policy])
    turns = [turn for _, turn in sorted(setup.generator.generate([base, policy, other_base]))]
    assert turns[0].ids == turns[2].ids != turns[1].ids == first.ids
    assert setup.generator.advance({0: base}) == []
    setup.update(1)
    setup.weights.push(2)
    [(_, under_way)] = setup.generator.advance({}, seconds=60.0)
    assert under_way.ids == turns[0].ids
    [(_, second)] = setup.generator.generate([policy])
    assert second.logprobs != first.logprobs
    setup.role.group.worker.use_view("base")
    expected = setup.logprobs([[*prompt, *turns[0].ids]])[0][len(prompt) - 1 :]
    setup.role.group.worker.use_view("live")
    for turn in (turns[0], under_way):
        assert float((expected - torch.tensor(turn.logprobs)).abs().max()) < 1e-5
    spec = setup.generator.spec
    setup.generator.spec = replace(spec, adapters=None)
    with pytest.raises(ConfigError, match=r"request 0 is for the policy's base.*--sync\.adapters alone"):
        setup.generator.generate([base])
    setup.generator.spec = spec


@pytest.mark.full
def test_layers_that_workers_share_get_their_parts_of_the_adapters():
    setup = AdapterSetup("all layers, rsLoRA", tensor_parallel=2)
    try:
        setup.weights.push(0)
        setup.update(3)
        assert setup.weights.push(1)["sync/canary"] < 1e-5
        assert setup.apart() < 1e-5
    finally:
        setup.generator.close()


def test_what_an_engine_cannot_serve_is_refused_before_it_starts():
    config = VllmGeneratorConfig
    adapters = TorchTrainer.adapters(
        TorchTrainerConfig(lora={"rank": 4}),
        ModelSpec(RoleSpec("policy", trained=True), path := str(model_path("llama", head_dim=32))),
    )
    spec = GeneratorSpec((1,), str, path, "fp32", adapters=adapters)
    assert VllmGenerator.refuses_adapters(config(), spec) == ""
    assert "images" in VllmGenerator.refuses_adapters(config(), replace(spec, max_images=1))
    for options, rank, device, message in (
        ({"pipeline_parallel": 2}, 4, None, "pipeline_parallel = 2"),
        ({}, 513, None, "rank = 513: vLLM's kernels support up to 512"),
        ({}, 4, "cuda", "generator.dtype = 'fp32'"),
    ):
        engine_spec = replace(spec, adapters=replace(adapters, rank=rank))
        with pytest.raises(CapabilityError, match=rf"{message}.*Set sync\.adapters = 'merged'"):
            VllmGenerator.check(config(**options), engine_spec, [], device)
