"""The kernels of attention on a GPU are compared in bf16 when a model is loaded. Here with kernels of the CPU, and with
a plain implementation in place of the GPU's kernel."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import CapabilityError
from rlhf_modeling import kernel_agreement, trainer
from rlhf_modeling.attention import LayerKind
from rlhf_modeling.kernel_agreement import compare, disagreement, kernels
from rlhf_modeling.matmul_attention import lay_out, matmul_attention
from rlhf_modeling.sdpa_attention import Options
from rlhf_modeling.shared_prefixes import share_prefixes

from plugins.backends.local.tests.test_flash_attention import stated

CPU = torch.device("cpu")
KINDS = [LayerKind(4, 2, 16, 16, 0.25, None, None), LayerKind(2, 2, 32, 32, 0.2, 4, None)]


def matmul(kind, window):
    shared = share_prefixes(kernel_agreement._ids(), kernel_agreement.LENGTHS)
    buckets = lay_out(shared.stretches, len(shared.ids_M), shared.place_N)
    return lambda q, k, v: matmul_attention(q, k, v, buckets, kind.scaling, window)


@pytest.mark.parametrize("kind", KINDS)
def test_two_kernels_of_the_cpu_agree_in_bf16(kind):
    sdpa = kernels(CPU, Options(kind.scaling, 0.0, kind.window, None))[1]
    assert not compare(kind, CPU, matmul(kind, kind.window), sdpa)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_the_cpu_that_compute_something_else_are_named(kind):
    sdpa = kernels(CPU, Options(kind.scaling, 0.0, kind.window, None))[1]
    assert "outputs differ by" in compare(kind, CPU, matmul(kind, 3), sdpa)
    assert "outputs differ by nan" in compare(kind, CPU, lambda q, k, v: sdpa(q, k, v) * torch.nan, sdpa)

    def without_a_head(q, k, v):
        return sdpa(q, torch.cat([k[:, :-1], k[:, -1:].detach()], 1), v)

    assert "gradients differ by" in compare(kind, CPU, without_a_head, sdpa)


@pytest.fixture
def on_gpu(monkeypatch):
    """Let a trainer on the CPU choose its kernel as on a GPU, where the kernel is a plain implementation."""
    monkeypatch.setattr(
        trainer, "why_not", lambda device, dtype: "" if dtype == torch.bfloat16 else "it computes in bf16"
    )
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", stated)
    return lambda kernel: monkeypatch.setattr(varlen, "varlen_attn", kernel)


def shifted(*arguments, window_size, **options):
    """A kernel whose queries see one key too few."""
    return stated(*arguments, window_size=(8, 0), **options)


def missing(*arguments, **options):
    raise RuntimeError("no kernel image is available\nfor this device")


def test_with_a_plain_kernel_the_layers_of_a_model_are_compared(make_trainer, on_gpu):
    policy = make_trainer(dtype="bf16")
    assert [(kind.heads, kind.window) for kind in policy.loaded_model.layers] == [(4, None)]
    assert policy.loaded_model.attention == "auto"
    assert not disagreement(policy.loaded_model.layers, CPU)


@pytest.mark.parametrize(
    ("kernel", "reason"), [(shifted, "outputs differ by"), (missing, "no kernel image is available")]
)
def test_with_a_wrong_kernel_auto_takes_sdpa_and_says_so_and_flash_is_refused(make_trainer, on_gpu, kernel, reason):
    on_gpu(kernel)
    policy = make_trainer(dtype="bf16")
    assert policy.loaded_model.attention == "sdpa"
    [note] = [note for note in policy.facts().notes if "attention" in note]
    assert "'sdpa', because with 'flash' " in note
    assert reason in note
    assert make_trainer(dtype="fp32").loaded_model.attention == "auto"
    policy.config = policy.config.model_copy(update={"attention": "flash"})
    with pytest.raises(CapabilityError, match=rf"trainer\.attention = 'flash': .*{reason}.* Remove the option"):
        policy.choose_kernel()
