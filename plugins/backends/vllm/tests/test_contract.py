"""The conformance suite of generators, with real engines."""

from collections.abc import Sequence
from typing import Any

import pytest
from rlhf.interfaces.model import LowRankAdapters, ModelSpec
from rlhf.types import RoleSpec
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_testing.generator import GeneratorContract, Sampled
from rlhf_testing.plain import PlainAdapterTrainer, PlainTrainer


class TestVllmGenerator(GeneratorContract):
    generator = VllmGenerator
    architectures = ("qwen3", "llama")
    sizes = {"head_dim": 32}
    configs = (
        VllmGenerator.Config(kv_cache_gib=0.0625, max_sequences=64),
        VllmGenerator.Config(kv_cache_gib=0.0625, max_sequences=2, prefix_caching=False, max_batched_tokens=300),
    )

    @pytest.fixture(autouse=True)
    def _engines(self, engines):
        self.engines = engines

    def make(
        self,
        config: Any,
        *,
        eos: Sequence[int] = (1,),
        architecture: str = "",
        seed: int = 0,
        adapters: LowRankAdapters | None = None,
    ) -> Sampled:
        path = self.path(architecture, seed)
        generator = self.engines.get(path, config, eos, adapters)
        trainer = PlainTrainer if adapters is None else PlainAdapterTrainer
        source = trainer(None, ModelSpec(RoleSpec("policy"), str(path), dtype="fp32"))
        sampled = Sampled(generator, source, generator.spec.decode)
        self.load(sampled, 0)
        return sampled


@pytest.mark.full
class TestSpeculative(TestVllmGenerator):
    """In ``make test`` test_speculative.py shows samples, seeds, log-probs and versions."""

    architectures = ("qwen3",)
    configs = (
        VllmGenerator.Config.model_validate(
            {"kv_cache_gib": 0.0625, "max_sequences": 64, "speculative": {"method": "ngram", "prompt_lookup_min": 1}}
        ),
    )

    @pytest.fixture(autouse=True)
    def _without_min_p(self, monkeypatch):
        monkeypatch.setattr(VllmGenerator, "capabilities", VllmGenerator.capabilities - {"min_p"})
