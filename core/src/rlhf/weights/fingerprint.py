"""A short mark of a tensor's dtype, shape and bytes, by which a receiver shows what arrived.

On the host it is XXH3. On a device, whose bytes would have to come to the host for that, it is a sum over 64-bit words,
each mixed with its position; integer sums do not depend on their order, so every device gets the same one. Neither is
meant against an adversary; they tell a stale, torn, swapped or rounded tensor from the one that was sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

WORDS = "words-"
"""How a mark begins that was computed from words; one of XXH3 has no such beginning."""
_CHUNK = 2**25
"""Bytes mixed at once: the temporary tensors are of this size."""
_GOLDEN, _MIX, _MIX_AGAIN = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of SplitMix64 (Steele et al., OOPSLA 2014), as signed numbers."""


def fingerprint(tensor: Tensor) -> str:
    """The mark that suits where the tensor lives: 16 hexadecimal digits, after :data:`WORDS` on a device."""
    return marks([tensor])[0]


def marks(tensors: Sequence[Tensor], like: str = "") -> list[str]:
    """The mark of each tensor, all of one kind.

    Args:
        like: a mark of the kind that is wanted; empty: of words where any of the tensors is on a device.
    """
    devices = [t.device for t in tensors if t.device.type != "cpu"]
    if tensors and (like.startswith(WORDS) if like else devices):
        home = devices[0] if devices else torch.device("cpu")
        totals = torch.stack([_sum_of_words(t).to(home) for t in tensors]).tolist()  # one transfer to the host for all
        return [WORDS + _named(t, (n % 2**64).to_bytes(8, "little")) for t, n in zip(tensors, totals, strict=True)]
    return [_named(t, host_bytes(t).data) for t in tensors]


def host_bytes(tensor: Tensor) -> np.ndarray:
    """uint8 array [nbytes], over the tensor's own memory where it is contiguous and on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _named(tensor: Tensor, data: bytes | memoryview) -> str:
    state = xxhash.xxh3_64(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    state.update(data)
    return state.hexdigest()


@torch.no_grad()
def _sum_of_words(tensor: Tensor) -> Tensor:
    """int64 []: the sum over words w at positions p of mix(w xor (p + 1) * golden), modulo 2^64, mix being the
    finaliser of SplitMix64."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        if part.numel() % 8 or part.data_ptr() % 8:  # a padded copy
            words = torch.zeros(-(-part.numel() // 8) * 8, dtype=torch.uint8, device=flat.device)
            words[: part.numel()] = part
            part = words
        z = torch.arange(start // 8 + 1, start // 8 + 1 + part.numel() // 8, device=flat.device).mul_(_GOLDEN)
        z.bitwise_xor_(part.view(torch.int64))
        _shift_in(z, 30).mul_(_MIX)
        _shift_in(z, 27).mul_(_MIX_AGAIN)
        total += _shift_in(z, 31).sum()
    return total


def _shift_in(z: Tensor, by: int) -> Tensor:
    """``z ^= z >> by``, as if the numbers had no sign."""
    return z.bitwise_xor_((z >> by).bitwise_and_((1 << (64 - by)) - 1))
