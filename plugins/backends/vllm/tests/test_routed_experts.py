"""Records of experts from vLLM's outputs, and engines that report none."""

from types import SimpleNamespace

import numpy as np
import pytest
from rlhf.errors import CapabilityError, ModelError
from rlhf.interfaces import GeneratorSpec
from rlhf.ops.experts import choices_of
from rlhf.types import ExpertLayers, GenerationRequest, Sampling
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.engine.arguments import arguments
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_plugin_vllm.platforms import current_platform
from rlhf_plugin_vllm.requests import VllmRequest
from rlhf_plugin_vllm.versions import require
from rlhf_testing.models import model_path

LAYERS = ExpertLayers((1, 3), 8, 2)
PROMPT = (5, 6, 7)
ROWS = np.arange(6 * 4 * 2).reshape(6, 4, 2).astype(np.uint8) % 8
"""Of 3 tokens of the prompt and 3 of 4 tokens of the answer; layers 0 and 2 of 4 are dense."""


def output(ids, rows, finished=True):
    logprobs = SimpleNamespace(logprobs=[-1.0] * len(ids))
    part = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="length", stop_reason=None)
    part.routed_experts = rows
    return SimpleNamespace(outputs=[part], finished=finished)


def experts_of(*outputs, layers=LAYERS, **sampling):
    request = VllmRequest(0, GenerationRequest(PROMPT, 0, Sampling(**sampling)), lambda ids: "x" * len(ids), 0, layers)
    *_, turns = (request.take(part) for part in outputs)
    return turns[0].experts


def test_layers_with_experts_are_recorded():
    assert np.array_equal(choices_of(experts_of(output([1, 2, 3, 4], ROWS))), ROWS[:, [1, 3]])
    parts = output([1, 2], None, finished=False), output([3, 4], ROWS)
    assert experts_of(*parts, stop=("y",)).tokens == 6
    assert experts_of(output([1, 2, 3, 4], None), layers=None) is None


def test_a_stop_string_ends_a_turn_without_a_record():
    assert experts_of(output([1, 2], None, finished=False), stop=("xx",)) is None


@pytest.mark.parametrize(
    "rows", [None, ROWS[1:], ROWS[:, :3], ROWS[..., :1]], ids=["none", "tokens", "layers", "experts"]
)
def test_other_shapes_are_refused(rows):
    with pytest.raises(
        ModelError, match=r"vLLM reports experts of shape .* expected \[6 tokens, more than 3 layers, 2"
    ):
        experts_of(output([1, 2, 3, 4], rows))


def test_engines_that_report_no_experts_are_refused():
    spec = GeneratorSpec((1,), str, str(model_path(head_dim=32)), "fp32", max_tokens=64, experts=LAYERS)
    for option, words in (
        ({"prefix_caching": False}, "prefix_caching = false"),
        ({"pipeline_parallel": 2}, "pipeline"),
    ):
        with pytest.raises(CapabilityError, match=f"{words}.* does not report the experts"):
            VllmGenerator.check(VllmGeneratorConfig(**option), spec, [], None)
    with pytest.raises(CapabilityError, match=r"needs vLLM 0\.32 or later; vllm 0\.31\.2 may report"):
        require("vllm 0.31.2", "trainer.router_replay", "may report wrong experts")
    require(current_platform().distribution, "trainer.router_replay", "")
    VllmGenerator.check(VllmGeneratorConfig(), spec, [], None)
    assert arguments(VllmGeneratorConfig(), spec, current_platform(), "fp32")["enable_return_routed_experts"]
