"""Compares the two GPU kernels of packed attention, ``flash`` and ``sdpa``, when a model is loaded.

The probe of a model (:mod:`rlhf_modeling.probe`) runs in fp32, which ``flash`` does not support, and on a CPU for
divided models. Here the kernels get random queries, keys and values in bf16 with the shapes from the probe, one kind of
layer at a time. Whole models would differ by the rounding of all layers, and by the experts that this rounding selects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from rlhf.seeds import derive_seed
from torch import Tensor

from rlhf_modeling.attention import LayerKind
from rlhf_modeling.flash_attention import fits, flash_attention
from rlhf_modeling.flash_attention import lay_out as flash_layout
from rlhf_modeling.sdpa_attention import Options, collect, sdpa_attention
from rlhf_modeling.shared_prefixes import share_prefixes

LENGTHS = (9, 14, 3, 1, 14, 12, 300)
"""Sequences that are compared. A block of the kernel has up to 128 tokens."""
PREFIX, SHARING = 6, (1, 4, 5)
"""Length of a shared prefix, and the sequences that share it."""
OUTPUTS, GRADIENTS = 2e-2, 5e-2
"""Largest relative norm of the difference. Two roundings to bf16 differ by less than 1e-2. A token too many or too few
in a window, or a gradient that misses a head of a group, differs by 1e-1 and more."""

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q [N, H, D] over k and v [N, K, D]."""


def disagreement(kinds: Iterable[LayerKind], device: torch.device) -> str:
    """Why ``flash`` cannot be used for layers of these kinds on this device. Empty if it agrees with ``sdpa``."""
    for kind in kinds:
        options = Options(kind.scaling, 0.0, kind.window, kind.softcap)
        q, k, v = (torch.empty(1, heads, 1, size, device="meta") for heads, size in kind.shapes)
        if not fits(q, k, v, options):
            continue
        layers = f"{kind.heads} heads of size {kind.size}, {kind.key_heads} key heads, window {kind.window}"
        try:
            problem = compare(kind, device, *kernels(device, options))
        except Exception as cause:  # any exception: the kernel may not take this device or these sizes
            problem = f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
        if problem:
            return f"{problem} ({layers})"
    return ""


def kernels(device: torch.device, options: Options) -> tuple[Compute, Compute]:
    """``flash`` and ``sdpa`` for the sequences of :data:`LENGTHS`."""
    shared = share_prefixes(_ids(), LENGTHS)
    assert shared is not None
    tokens, place_N = int(shared.ids_M.numel()), shared.place_N.to(device)
    lines = flash_layout(shared.stretches, tokens, place_N, device)
    runs = collect(shared.stretches, tokens, place_N, device)
    return (
        lambda q, k, v: flash_attention(q, k, v, lines, options),
        lambda q, k, v: sdpa_attention(q, k, v, runs, options),
    )


@torch.enable_grad()
def compare(kind: LayerKind, device: torch.device, first: Compute, second: Compute) -> str:
    """The difference of outputs or gradients of two kernels in bf16. Empty if only rounding differs."""
    generator = torch.Generator().manual_seed(derive_seed(0, "attention"))
    shared = share_prefixes(_ids(), LENGTHS)
    assert shared is not None
    tokens = int(shared.ids_M.numel())
    inputs = [torch.randn(tokens, heads, size, generator=generator) for heads, size in kind.shapes]
    towards = torch.randn(tokens, kind.heads, kind.value_size, generator=generator).to(device, torch.bfloat16)
    answers = []
    for compute in (first, second):
        leaves = [x.to(device, torch.bfloat16).requires_grad_() for x in inputs]
        out = compute(*leaves)
        answers.append([out.detach(), *torch.autograd.grad(out, leaves, towards)])
    for name, actual, want in zip(("outputs", "gradients", "gradients", "gradients"), *answers, strict=True):
        difference = float((actual.float() - want.float()).norm() / want.float().norm())
        # True also for NaN.
        if not difference <= (OUTPUTS if name == "outputs" else GRADIENTS):
            return f"{name} differ by {difference:.1e} from those of 'sdpa', norm-wise"
    return ""


def _ids() -> Tensor:
    """int64 [tokens of all sequences]: no two are equal, except in the shared prefix."""
    parts = [torch.arange(n) + 1000 * (b + 1) for b, n in enumerate(LENGTHS)]
    for b in SHARING:
        parts[b][:PREFIX] = torch.arange(PREFIX)
    return torch.cat(parts)
