"""The count of floating-point operations against what torch counts in transformers' own forward pass."""

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf.interfaces.model import Flops
from rlhf.types import RoleSpec
from rlhf_modeling.flops import count_flops
from rlhf_testing.tiny import tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

LENGTH = 24
MODELS = {
    "llama": {"tied": False},
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": {
        "kv_heads": 4, "head_dim": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def spec(path, **changes):
    return ModelSpec(RoleSpec("policy", trained=True), str(path), **changes)


@pytest.mark.parametrize("architecture", MODELS)
def test_operations_of_a_forward_pass_equal_those_that_torch_counts(tmp_path, architecture):
    tiny_model(tmp_path, architecture=architecture, **MODELS[architecture])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", experts_implementation="eager")
    flops = count_flops(spec(tmp_path), model.get_output_embeddings().out_features, adapters=False)
    assert flops is not None
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(LENGTH)[None], use_cache=False)
    every_pair = (
        sum(operations for _, operations in flops.pairs) * LENGTH**2
    )  # eager attention computes masked ones too
    total = (flops.token + flops.head) * LENGTH + every_pair
    assert total == pytest.approx(counter.get_total_flops(), rel=0.01)  # without the frequencies of rotary embeddings


def test_an_update_has_a_backward_pass_of_twice_the_operations():
    flops = Flops(token=10.0, head=4.0, pairs=((None, 1.0), (2, 100.0)))
    assert flops.of_update([3], outputs=2) == 3 * (10 * 3 + 4 * 2 + 1 * (1 + 2 + 3) + 100 * (1 + 2 + 2))
    assert flops.of_update([3, 1], outputs=2) - flops.of_update([3], outputs=2) == 3 * (10 + 1 + 100)
    frozen = Flops(token=10.0, head=4.0, trained=0.0)
    assert frozen.of_update([3], outputs=2) == 2 * (10 * 3 + 4 * 2)


def test_nothing_is_counted_where_the_count_would_be_wrong(tmp_path):
    tiny_model(tmp_path, architecture="llama4_text", attention_chunk_size=8, num_local_experts=2)
    assert count_flops(spec(tmp_path), 8, adapters=False) is None  # its layers have chunks
    assert count_flops(spec(tmp_path, images=True), 8, adapters=False) is None
    assert count_flops(spec(tmp_path / "none"), 8, adapters=False) is None
