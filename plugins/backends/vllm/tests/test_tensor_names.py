"""The tensor names of packed parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rlhf_plugin_vllm.worker.tensor_names import TensorNames


@pytest.fixture
def names():
    packed = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
        "c_attn": ["c_attn"],
    }
    return TensorNames(SimpleNamespace(packed_modules_mapping=packed))


def test_parameters_of_tensors(names):
    assert names.place("model.layers.3.self_attn.k_proj.bias") == ("model.layers.3.self_attn.qkv_proj.bias", 1)
    assert names.place("model.layers.3.mlp.down_proj.weight") == ("model.layers.3.mlp.down_proj.weight", None)
    assert names.place("h.0.c_attn.weight") == ("h.0.c_attn.weight", None)


def test_missing_tensors_are_named_as_they_are_sent(names):
    needed = ["model.norm.weight", "l.qkv_proj.weight", "l.gate_up_proj.weight", "l.c_attn.weight"]
    stream = ["model.norm.weight", "l.q_proj.weight", "l.k_proj.weight", "l.v_proj.weight", "l.gate_proj.weight",
            "l.up_proj.weight", "l.c_attn.weight"]  # fmt: skip
    present = set(needed)
    assert names.missing(needed, present, stream) == []
    assert names.missing(needed, present, [n for n in stream if "k_proj" not in n]) == ["l.k_proj.weight"]
    assert names.missing(needed, present - {"model.norm.weight"}, stream[1:]) == ["model.norm.weight"]
    assert names.missing(needed, present - {"l.qkv_proj.weight"}, [stream[0], *stream[4:]]) == stream[1:4]
    fused = ["model.norm.weight", "l.qkv_proj.weight", "l.gate_up_proj.weight", "l.c_attn.weight"]
    assert names.missing(needed, present, fused) == [], "a checkpoint that is packed in vLLM's way"
