"""Fingerprints of a tensor's dtype, shape and bytes. A receiver of weights reports them to show what arrived.

On the host the fingerprint is XXH3. On a device it is a sum over 64-bit words, each mixed with its position, so that
the bytes need not be copied to the host. Integer sums do not depend on their order, so every device computes the same
sum. Both kinds detect a tensor that is old, partly overwritten, swapped or rounded. Neither is safe against an
adversary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

WORDS = "words-"
"""Prefix of a fingerprint that was computed from words. A fingerprint by XXH3 has no prefix."""
_CHUNK = 2**25
"""Number of bytes that are mixed at once, which is the size of the temporary tensors."""
_GOLDEN, _MIX, _MIX_AGAIN = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""Constants of SplitMix64 (Steele et al., OOPSLA 2014), as signed numbers."""


def fingerprint(tensor: Tensor) -> str:
    """The fingerprint: 16 hexadecimal digits, with the prefix :data:`WORDS` for a tensor on a device."""
    return marks([tensor])[0]


def marks(tensors: Sequence[Tensor], like: str = "") -> list[str]:
    """The fingerprint of each tensor, all of one kind.

    Args:
        like: a fingerprint of the wanted kind. Empty: the kind computed from words if a tensor is on a device, else
            XXH3.
    """
    devices = [t.device for t in tensors if t.device.type != "cpu"]
    if tensors and (like.startswith(WORDS) if like else devices):
        home = devices[0] if devices else torch.device("cpu")
        totals = torch.stack([_sum_of_words(t).to(home) for t in tensors]).tolist()  # one transfer to the host for all
        return [WORDS + _digest(t, (n % 2**64).to_bytes(8, "little")) for t, n in zip(tensors, totals, strict=True)]
    return [_digest(t, host_bytes(t).data) for t in tensors]


def host_bytes(tensor: Tensor) -> np.ndarray:
    """uint8 array [nbytes]. It shares the tensor's memory if the tensor is contiguous and on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _digest(tensor: Tensor, data: bytes | memoryview) -> str:
    state = xxhash.xxh3_64(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    state.update(data)
    return state.hexdigest()


@torch.no_grad()
def _sum_of_words(tensor: Tensor) -> Tensor:
    """int64 []: the sum over words w at positions p of mix(w xor (p + 1) * golden), modulo 2^64. ``mix`` is the
    finaliser of SplitMix64."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        # view(int64) needs whole words at addresses that are multiples of 8.
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
    """``z ^= z >> by``, as for unsigned numbers."""
    return z.bitwise_xor_((z >> by).bitwise_and_((1 << (64 - by)) - 1))
