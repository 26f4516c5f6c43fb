"""Attention of packed sequences on a GPU: one call of torch's ``varlen_attn`` for sequences of all lengths.

FlashAttention-2 (Dao 2023, arXiv:2307.08691); bf16 only. Shape suffixes are those of
:mod:`rlhf_modeling.sdpa_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from rlhf.errors import CapabilityError
from rlhf.ops.spans import moved
from torch import Tensor

from rlhf_modeling.sdpa_attention import Options
from rlhf_modeling.shared_prefixes import Stretch, take_rows

LARGEST_HEAD = 256
"""Largest head size of the kernel. Head sizes must also be multiples of 8."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Boundaries of the sequences among queries and keys. A sequence with a shared prefix has fewer queries than keys;
    the kernel aligns its queries with the last keys."""

    keys: Tensor | None
    """int64: the tokens whose keys are used, sequence after sequence; None: all N in order."""
    ends_Q: Tensor
    """int32 [sequences + 1]: cumulative number of queries, from 0."""
    ends_K: Tensor
    longest_Q: int
    longest_K: int


def lay_out(stretches: Sequence[Stretch], tokens: int, place: Tensor | None, device: torch.device) -> Lines:
    """Same arguments as :func:`rlhf_modeling.matmul_attention.lay_out`. The stretches hold all tokens, in order."""
    query_lens, key_lens = [s.length - s.skip for s in stretches], [s.length for s in stretches]
    keys = None
    if place is not None and any(s.skip for s in stretches):
        keys = moved(torch.cat([place[s.first : s.first + s.length] for s in stretches]), device)
    ends = [moved(torch.tensor([0, *accumulate(n)], dtype=torch.int32), device) for n in (query_lens, key_lens)]
    assert sum(query_lens) == tokens
    return Lines(keys, ends[0], ends[1], max(query_lens), max(key_lens))


def flash_attention(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, lines: Lines, options: Options) -> Tensor:
    """[N, H, D]."""
    from torch.nn.attention.varlen import varlen_attn

    k, v = (x if lines.keys is None else take_rows(x, lines.keys) for x in (k_NKD, v_NKD))
    grouped = q_NHD.shape[1] // k_NKD.shape[1]
    options_of_torch: dict[str, Any] = {"enable_gqa": True} if grouped > 1 else {}
    if grouped > 1 and "enable_gqa" not in _options(varlen_attn):  # torch 2.11
        k, v, options_of_torch = k.repeat_interleave(grouped, 1), v.repeat_interleave(grouped, 1), {}
    # torch counts the tokens before the query. transformers' window includes the query's own token.
    window = -1 if options.window is None or options.window >= lines.longest_K else options.window - 1
    out: Any = varlen_attn(
        q_NHD.contiguous(),
        k.contiguous(),
        v.contiguous(),
        lines.ends_Q,
        lines.ends_K,
        lines.longest_Q,
        lines.longest_K,
        scale=options.scaling,
        window_size=(window, 0),
        **options_of_torch,
    )
    return out


def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernel is not available in this process. Empty if it is available for layers that :func:`fits`."""
    if device.type != "cuda":
        return "it runs only on GPUs"
    if dtype != torch.bfloat16:
        return f"it computes in bf16, but this role computes in {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    missing = {"window_size", "scale"} - _options(varlen_attn)
    return f"varlen_attn of torch {torch.__version__} has no {', '.join(sorted(missing))}" if missing else ""


@cache
def _options(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's parameters. Cached, because reading them takes longer than launching a kernel and every
    layer needs them."""
    return frozenset(inspect.signature(function).parameters)


def check_kernel(kernel: str, device: torch.device, bf16: bool) -> None:
    """Raises CapabilityError if ``trainer.attention`` names a kernel that is not available in this process."""
    if kernel == "auto":
        return
    problem = f"this role is on {device.type!r}, but the option chooses a GPU kernel" if device.type != "cuda" else ""
    if kernel == "flash":
        problem = problem or why_not(device, torch.bfloat16 if bf16 else torch.float32)
    if problem:
        raise CapabilityError(f"trainer.attention = {kernel!r} is not available: {problem}. Remove the option.")


def fits(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether the kernel can compute this layer."""
    size = q.shape[-1]
    return (
        k.shape == v.shape
        and size <= LARGEST_HEAD
        and size % 8 == 0
        and not options.dropout
        and options.softcap is None
    )
