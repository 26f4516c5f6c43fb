"""Real engines, shared by the tests of a module, because a start takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.interfaces.model import LowRankAdapters
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.generator import VllmGenerator
from transformers import AutoTokenizer

sys.path.insert(0, os.path.dirname(__file__))  # for worker_forks


class Engines:
    """The engines of one test module, by their options."""

    small = VllmGeneratorConfig(kv_cache_gib=0.0625, max_sequences=64)

    def __init__(self) -> None:
        self._started: dict[tuple[VllmGeneratorConfig, str, LowRankAdapters | None], VllmGenerator] = {}

    def get(
        self,
        path: Path,
        config: VllmGeneratorConfig = small,
        eos: Sequence[int] = (1,),
        adapters: LowRankAdapters | None = None,
    ) -> VllmGenerator:
        """An engine for models with the architecture and sizes of the model at ``path``. Its weights may be those of
        an earlier test."""
        text = (Path(path) / "config.json").read_text()
        key = config, text, adapters
        if key not in self._started:
            self._started[key] = VllmGenerator(config, self.spec(path, adapters=adapters))
        generator = self._started[key]
        generator.wake()
        generator.spec = self.spec(path, eos, adapters=adapters)
        return generator

    def spec(self, path: Path, eos: Sequence[int] = (1,), **other: object) -> GeneratorSpec:
        tokenizer = AutoTokenizer.from_pretrained(str(path))

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=True))

        return GeneratorSpec(tuple(eos), decode, str(path), "fp32", **{"max_tokens": 256, **other})

    def close(self) -> None:
        while self._started:
            self._started.popitem()[1].close()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    instance = Engines()
    yield instance
    instance.close()
