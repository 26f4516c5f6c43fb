"""Models whose rows cannot be divided over ranks are refused: from their config, or when they are loaded."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import CapabilityError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_modeling.model import load_model
from rlhf_modeling.sharded.sequence_parallel import check_sequence_parallel, require_divisible
from rlhf_testing.tiny import tiny_model

from tests.support.tiny_architectures import tiny_architecture

CPU = torch.device("cpu")


def spec(path, ranks: int = 2) -> ModelSpec:
    return ModelSpec(RoleSpec("policy", trained=True), str(path), dtype="fp32", world_size=ranks)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("plain"), hidden=16, heads=2, kv_heads=1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("lfm2", "Lfm2ForCausalLM cannot be divided over ranks (it has recurrent or convolutional layers)"),
        ("phi3 with longrope", "the frequencies of its rotary embedding depend on the length of the whole sequence"),
        ("bloom", "BloomForCausalLM does not take an attention function"),
        ("gpt_oss", "it has attention sinks, which packed attention does not support"),
    ],
)
def test_the_config_shows_what_is_refused(tmp_path, kind, reason):
    tiny_architecture(tmp_path, kind)
    with pytest.raises(CapabilityError) as refused:
        check_sequence_parallel(spec(tmp_path), 2)
    assert reason in str(refused.value)
    assert "Set sequence_parallel = 1 for this role" in str(refused.value)
    check_sequence_parallel(spec(tmp_path), 1)


def test_ranks_and_heads_must_be_divisible(plain):
    check_sequence_parallel(spec(plain), 2)
    with pytest.raises(CapabilityError, match=r"does not divide the 3 ranks of role 'policy': set placement.policy"):
        check_sequence_parallel(spec(plain, 3), 2)
    with pytest.raises(CapabilityError, match=r"does not divide the 2 attention heads of Qwen3.* Use a divisor: 1, 2"):
        check_sequence_parallel(spec(plain, 4), 4)


def test_the_probe_refuses_what_the_config_does_not_show(tmp_path, plain):
    tiny_architecture(tmp_path, "gpt_oss")
    with pytest.raises(CapabilityError, match="attention sinks, which packed attention does not support"):
        require_divisible(load_model(spec(tmp_path), CPU), 2)
    model = load_model(spec(plain), CPU)
    require_divisible(model, 2)
    with pytest.raises(CapabilityError, match="does not divide the 2 attention heads"):
        require_divisible(model, 4)
    model.module.model.norm.register_forward_hook(lambda module, inputs, out: out + out.roll(1, 1))
    with pytest.raises(CapabilityError, match="parts of its layers other than attention depend on other tokens"):
        require_divisible(model, 2)
