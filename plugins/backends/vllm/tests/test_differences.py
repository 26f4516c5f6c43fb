"""A server's part in syncs of differences: memory of the plan, and servers whose parameters would be rounded."""

from __future__ import annotations

import pytest
from rlhf.interfaces import GeneratorSpec
from rlhf.interfaces.memory import ModelSize, SamplingWork
from rlhf_engines.server_config import EngineServersConfig
from rlhf_plugin_vllm.server.generator import VllmServerGenerator, unusable


@pytest.mark.parametrize(
    ("sync", "dtype", "device", "parts"),
    [
        ("whole", "bf16", "cuda", ({}, 0)),
        ("differences", "bf16", "cuda", ({}, 2 * 10**9)),
        ("differences", "fp32", "cuda", ({}, 4 * 10**9)),
        ("differences", "fp32", "cpu", ({"weights": 4 * 10**9}, 0)),
    ],
)
def test_the_plan_counts_the_copy_of_what_was_sent(sync, dtype, device, parts):
    config = EngineServersConfig(urls=("http://127.0.0.1:1",), sync=sync)
    size = ModelSize("m", "llama", 10**9, 8, 9, 9, True, 72, 72, (), cache_elements=0, cache_heads=1)
    memory = VllmServerGenerator.memory(config, dtype, size, SamplingWork(1, 1, 8, 4), device, None)
    assert {(tuple(phase.device.items()), phase.host) for phase in memory.phases.values()} == {
        (tuple(parts[0].items()), parts[1])
    }


@pytest.mark.parametrize(
    ("sync", "formats", "refused"), [("differences", 2, True), ("differences", 1, False), ("whole", 2, False)]
)
def test_a_server_whose_parameters_differences_would_round_is_refused(sync, formats, refused):
    facts = {"dtype": "bfloat16", "formats": ["bfloat16", "float32"][:formats], "length": 300}
    facts |= {"logprobs_mode": "processed_logprobs", "quantization": None, "speculative": False, "data_parallel": 1}
    message = unusable(
        facts | {"device": "cuda", "chunked_prefill": True}, GeneratorSpec((), str, max_tokens=256), sync
    )
    reason = (
        "keeps parameters in bfloat16 and float32; differences would round all of them to bfloat16. Set generator.sync"
    )
    assert message.startswith(reason) if refused else not message
