"""Stop strings that span tokens, and the tensor names of packed parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rlhf_plugin_vllm.stop_strings import StopSearch
from rlhf_plugin_vllm.worker.tensor_names import TensorNames

PIECES = ["a", "b", "END", "EN", "D", " ", "é"[:0], "xENDy", "E", "N"]


def decode(ids):
    return "".join(PIECES[i] for i in ids)


@pytest.mark.parametrize(
    ("ids", "stops", "end"),
    [
        ([0, 1, 2, 0], ["END"], 3),
        ([0, 3, 4, 0], ["END"], 3),
        ([8, 9, 4], ["END"], 3),
        ([0, 7, 1], ["END"], 2),
        ([0, 1, 0, 1], ["END"], None),
        ([0, 1, 0, 1], ["END", "ba"], 3),
        ([0, 0, 1, 1, 6, 6, 6, 8, 9, 6, 4], ["END"], 11),
    ],
)
def test_a_stop_string_ends_with_the_token_that_completes_it(ids, stops, end):
    assert StopSearch(stops, decode).end(ids) == end, "all tokens at once"
    search = StopSearch(stops, decode)
    grown = [search.end(ids[:n]) for n in range(1, len(ids) + 1)]
    assert next((n for n in grown if n is not None), None) == end, "one by one"


def test_a_long_sample_is_not_decoded_from_its_start_at_every_token():
    decoded = []

    def counting(ids):
        decoded.append(len(ids))
        return decode(ids)

    search, ids = StopSearch(["END"], counting), []
    for _ in range(500):
        ids.append(0)
        assert search.end(ids) is None
    assert max(decoded) < 20


def test_characters_over_several_tokens_are_found_when_complete():
    text = "xé!".encode()

    def bytewise(ids):
        return bytes(text[i] for i in ids).decode(errors="replace")

    assert StopSearch(["é"], bytewise).end([0, 1, 2, 3]) == 3


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
    sent = ["model.norm.weight", "l.q_proj.weight", "l.k_proj.weight", "l.v_proj.weight", "l.gate_proj.weight",
            "l.up_proj.weight", "l.c_attn.weight"]  # fmt: skip
    loaded = set(needed)
    assert names.missing(needed, loaded, sent) == []
    assert names.missing(needed, loaded, [n for n in sent if "k_proj" not in n]) == ["l.k_proj.weight"]
    assert names.missing(needed, loaded - {"model.norm.weight"}, sent[1:]) == ["model.norm.weight"]
    assert names.missing(needed, loaded - {"l.qkv_proj.weight"}, [sent[0], *sent[4:]]) == sent[1:4]
    fused = ["model.norm.weight", "l.qkv_proj.weight", "l.gate_up_proj.weight", "l.c_attn.weight"]
    assert names.missing(needed, loaded, fused) == [], "a checkpoint that is packed in vLLM's way"
