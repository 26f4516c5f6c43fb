"""The layout of flash attention: one kernel call for all sequences, on GPUs.

Here the kernel is a plain implementation of torch's documentation, so these tests check the arguments of the call.
`benchmarks/gpu` compares the real kernel.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from rlhf.errors import CapabilityError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_modeling import flash_attention, sdpa_attention
from rlhf_modeling.attention import PackedAttention
from rlhf_modeling.sdpa_attention import Options
from rlhf_modeling.shared_prefixes import Stretch, share_prefixes
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_testing.models import model_path

CPU = torch.device("cpu")


def stated(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size, enable_gqa=False):
    """Sequence by sequence: the queries are the last ones; a query at position i sees keys i - left .. i."""
    left, right = window_size
    assert right == 0
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert (ends_q.dtype, ends_k.dtype) == (torch.int32, torch.int32)
    assert longest_q == int(ends_q.diff().max())
    assert longest_k == int(ends_k.diff().max())
    out = []
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(ends_q.tolist()), itertools.pairwise(ends_k.tolist()), strict=True
    ):
        queries, keys, values = (
            x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1])
        )
        i = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None]
        j = torch.arange(k1 - k0)[None, :]
        visible = (j <= i) & ((i - j <= left) | (left < 0))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), values))
    return torch.cat(out)


def older(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size):
    """An older version of the kernel, without grouped heads."""
    return stated(q, k, v, ends_q, ends_k, longest_q, longest_k, scale=scale, window_size=window_size)


@pytest.fixture(params=[stated, older])
def kernel(request, monkeypatch):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", request.param)


def rows(tokens: int, heads: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, heads, 8, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def run_kernels(stretches, tokens, place, options):
    """(flash, sdpa), each with the gradients of q, k and v."""
    answers = []
    for compute in (
        lambda q, k, v: flash_attention.flash_attention(
            q, k, v, flash_attention.lay_out(stretches, tokens, place, CPU), options
        ),
        lambda q, k, v: sdpa_attention.sdpa_attention(
            q, k, v, sdpa_attention.collect(stretches, tokens, place, CPU), options
        ),
    ):
        inputs = rows(tokens, 4, 1), rows(tokens, 2, 2), rows(tokens, 2, 3)
        out = compute(*inputs)
        (out * rows(tokens, 4, 4).detach()).sum().backward()
        answers.append([out.detach(), *(x.grad for x in inputs)])
    return answers


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_packed_sequences(kernel, window):
    lens = [5, 1, 9, 9]
    starts = [0, 5, 6, 15]
    stretches = [Stretch(s, 0, n, s) for s, n in zip(starts, lens, strict=True)]
    for a, b in zip(*run_kernels(stretches, 24, None, Options(0.3, 0.0, window, None)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_shared_prefixes(kernel, window):
    prompt = [7, 8, 9, 10, 11]
    sequences = [[*prompt, 1, 2], [*prompt, 1, 3, 4], [20, 21], [*prompt, 5], [*prompt, 5]]
    shared = share_prefixes(torch.tensor([i for s in sequences for i in s]), [len(s) for s in sequences])
    assert shared is not None
    tokens = int(shared.ids_M.numel())
    assert tokens < sum(map(len, sequences))
    for a, b in zip(
        *run_kernels(shared.stretches, tokens, shared.place_N, Options(0.3, 0.0, window, None)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_layers_that_the_flash_kernel_cannot_compute_are_recognised():
    q, k = torch.zeros(1, 4, 3, 64), torch.zeros(1, 2, 3, 64)
    assert flash_attention.fits(q, k, k, Options(1.0, 0.0, None, None))
    assert not flash_attention.fits(q, k, k[..., :32], Options(1.0, 0.0, None, None))
    assert not flash_attention.fits(q, k, k, Options(1.0, 0.1, None, None))
    assert not flash_attention.fits(q, k, k, Options(1.0, 0.0, None, 30.0))
    assert not flash_attention.fits(*[torch.zeros(1, 2, 3, 20)] * 3, Options(1.0, 0.0, None, None))


def test_flash_attention_is_refused_without_a_gpu():
    spec = ModelSpec(RoleSpec("policy", trained=True), str(model_path()), "fp32")
    for kernel in ("flash", "sdpa"):
        config = TorchTrainerConfig(device="cpu", attention=kernel)
        with pytest.raises(CapabilityError, match=rf"trainer\.attention = '{kernel}' is not available: .*GPU kernel"):
            TorchTrainer(config, spec)
    assert "bf16" in flash_attention.why_not(torch.device("cuda"), torch.float32)


@pytest.mark.parametrize("window", [None, 3])
def test_with_tensors_that_claim_to_be_on_a_gpu_no_kernel_gets_groups_that_it_would_compute_with_all_scores(
    monkeypatch, window
):
    """The results are those with groups. In bf16 without a window the flash kernel takes groups."""
    calls, attend = [], torch.nn.functional.scaled_dot_product_attention

    def recording(q, k, v, **options):
        calls.append((q.dtype, q.shape[1] == k.shape[1], options["enable_gqa"]))
        return attend(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    stretches, options = [Stretch(0, 0, 6, 0), Stretch(6, 0, 6, 6)], Options(0.3, 0.0, window, None)
    runs = sdpa_attention.collect(stretches, 12, None, CPU)
    q, k, v = rows(12, 4, 1), rows(12, 2, 2), rows(12, 2, 3)
    want = sdpa_attention.sdpa_attention(q, k, v, runs, options)
    low = [x.bfloat16() for x in (q, k, v)]
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    result = sdpa_attention.sdpa_attention(q, k, v, runs, options)
    sdpa_attention.sdpa_attention(*low, runs, options)
    torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-6)
    in_fp32, in_bf16 = (torch.float32, True, False), (torch.bfloat16, window is not None, window is None)
    assert calls == [(torch.float32, False, True), in_fp32, in_bf16]


def test_whether_the_kernel_is_there_is_asked_once_a_micro_batch_by_a_stand_in_for_the_driver(monkeypatch):
    calls = []
    monkeypatch.setattr(flash_attention, "why_not", lambda *arguments: calls.append(arguments) or "no GPU")
    attention = PackedAttention([3])
    q = torch.zeros(1, 2, 3, 8)
    options = Options(1.0, 0.0, None, None)
    assert not any(attention._flashes(q, q, q, torch.bfloat16, options) for _ in range(3))
    assert len(calls) == 1
    assert not attention._flashes(q, q, q, torch.float32, options)
    assert len(calls) == 2, "another precision"
