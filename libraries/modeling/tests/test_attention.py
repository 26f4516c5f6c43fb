"""Packed sequences do not attend to each other: results equal those of one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import ModelError
from rlhf_modeling.attention import NAME, PackedAttention, packed, use_packed_attention
from rlhf_modeling.matmul_attention import lay_out, matmul_attention, padded
from rlhf_modeling.shared_prefixes import Stretch
from rlhf_testing.tiny import tiny_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

LENS = [7, 12, 5]

ARCHITECTURES = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 4},
}


def ids_and_positions(lens):
    g = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 90, (n,), generator=g) for n in lens]
    return ids, torch.cat([torch.arange(n) for n in lens])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("defaults", [True, False], ids=["use_cache_default", "use_cache_off"])
def test_packed_equals_one_by_one_with_transformers_own_attention(architecture, defaults, tmp_path):
    path = tiny_model(tmp_path, architecture=architecture, **ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    ids, position_N = ids_and_positions(LENS)
    expected = torch.cat([model(input_ids=i[None], use_cache=False).logits[0] for i in ids]).log_softmax(-1)
    expected.square().sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    use_packed_attention(model)
    options = {} if defaults else {"use_cache": False}
    with packed(LENS):
        result = (
            model(input_ids=torch.cat(ids)[None], position_ids=position_N[None], **options).logits[0].log_softmax(-1)
        )
        result.square().sum().backward()
    assert (result - expected).abs().max() < 5e-6
    for name, p in model.named_parameters():
        assert (p.grad - gradients[name]).norm() <= 1e-5 * gradients[name].norm() + 1e-7, name


def test_packing_by_transformers_itself_leaks_between_sequences(tmp_path):
    """The reason for this project's own packing. The test fails if transformers fixes it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path)).eval()
    ids, position_N = ids_and_positions(LENS)
    with torch.no_grad():
        reference = torch.cat([model(input_ids=i[None]).logits[0] for i in ids])
        row = model(input_ids=torch.cat(ids)[None], position_ids=position_N[None]).logits[0]
    assert (reference - row).abs().max() > 1e-2


MIXTURES = [[7, 12, 5], [70, 70, 70, 33], [170, 9, 170, 170, 200, 3], [1, 2, 1]]


@pytest.mark.parametrize("lens", MIXTURES)
def test_attention_is_bit_equal_to_one_sequence_at_a_time(lens):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, sum(lens), 8, generator=g) for h in (4, 2, 2))
    full, _ = PackedAttention(lens)(None, q, k, v, None)
    parts = zip(q.split(lens, 2), k.split(lens, 2), v.split(lens, 2), strict=True)
    single = [PackedAttention([a.shape[2]])(None, a, b, c, None)[0] for a, b, c in parts]
    assert torch.equal(full, torch.cat(single, 1))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_and_long_sequences_equal_sdpa(window, dtype):
    lens = [5, 170, 8, 8, 170, 33] if dtype == torch.float32 else [5, 530, 8, 33]
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, sum(lens), 8, generator=g).requires_grad_() for h in (4, 2, 2))

    def reference(q, k, v):
        parts = []
        for a, b, c in zip(q.split(lens, 2), k.split(lens, 2), v.split(lens, 2), strict=True):
            distance = torch.arange(a.shape[2])[:, None] - torch.arange(a.shape[2])[None]
            mask = (distance >= 0) & (distance < (window or 10**6))
            parts.append(F.scaled_dot_product_attention(a, b, c, attn_mask=mask, enable_gqa=True))
        return torch.cat(parts, 2).transpose(1, 2)

    expected = reference(q, k, v)
    weight = torch.randn(expected.shape, generator=g)
    gradients = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    low = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    output, _ = PackedAttention(lens)(None, *low, None, sliding_window=window)
    assert output.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (output.float() - expected).norm() < tolerance * expected.norm()
    for grad, expected_grad in zip(torch.autograd.grad((output.float() * weight).sum(), low), gradients, strict=True):
        assert (grad.float() - expected_grad).norm() < tolerance * expected_grad.norm()


def test_matmul_attention_passes_gradcheck():
    layout = lay_out([Stretch(0, 0, 3, 0), Stretch(3, 0, 5, 3)], tokens=8)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, h, 4, generator=g, dtype=torch.float64).requires_grad_() for h in (2, 1, 1))

    def run(q, k, v):
        return matmul_attention(q, k, v, layout, 0.5, 3)

    assert torch.autograd.gradcheck(run, (q, k, v), eps=1e-3, atol=2e-3, rtol=2e-3)  # the softmax inside is fp32


def test_a_sequence_is_padded_by_its_own_length_only():
    assert [padded(n) for n in (1, 8, 9, 128, 129, 160)] == [8, 8, 16, 128, 144, 160]


def test_a_call_without_lengths_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path))
    use_packed_attention(model)
    assert model.config._attn_implementation == NAME
    with pytest.raises(ModelError, match="no lengths are given"):
        model(input_ids=torch.tensor([[3, 4]]))
    with packed([3]), pytest.raises(ModelError, match="one row of 3 tokens but got queries"):
        model(input_ids=torch.tensor([[3, 4]]))


def test_a_mask_is_refused():
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match="needs a mask"):
        PackedAttention([3])(None, q, q, q, torch.ones(3, 3))
    with pytest.raises(ModelError, match="attention sinks"):
        PackedAttention([3])(None, q, q, q, None, s_aux=torch.zeros(2))


@pytest.mark.parametrize("lens", [[5, 9], [5, 170]], ids=["short", "long"])
def test_values_may_have_another_size_than_keys(lens):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, sum(lens), size, generator=g) for size in (8, 8, 4))
    output, _ = PackedAttention(lens)(None, q, k, v, None)
    parts = zip(*(x.split(lens, 2) for x in (q, k, v)), strict=True)
    expected = torch.cat([F.scaled_dot_product_attention(a, b, c, is_causal=True) for a, b, c in parts], 2)
    assert torch.allclose(output, expected.transpose(1, 2), atol=1e-6)


def test_keys_of_another_row_are_refused():
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    with pytest.raises(ModelError, match=r"one row of 3 tokens but got queries \(1, 2, 3, 4\) and keys \(1, 2, 5, 4\)"):
        PackedAttention([3])(None, q, k, k, None)
