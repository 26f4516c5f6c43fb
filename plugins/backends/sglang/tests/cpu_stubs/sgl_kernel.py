"""In place of SGLang's kernels, which have no wheel for CPUs: the hash that draws tokens by seeds. The backends
``torch_native`` and ``pytorch`` call no other one."""

import torch

MASK = 0xFFFFFFFF


def _rotated(x, by):
    return ((x << by) | (x >> (32 - by))) & MASK


def _mixed(h, k):
    k = (_rotated((k * 0xCC9E2D51) & MASK, 15) * 0x1B873593) & MASK
    return (_rotated(h ^ k, 13) * 5 + 0xE6546B64) & MASK


def _murmur_hash32(seed, positions, col_indices):
    """MurmurHash3 (Appleby, 2011) of four 32-bit words: the seed's halves, the position, the token."""
    s = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    h = _mixed(_mixed(torch.zeros_like(s), s & MASK), (s >> 32) & MASK)
    h = _mixed(h, positions.to(torch.int64) & MASK)
    h = _mixed(h[:, None], (col_indices.to(torch.int64) & MASK)[None, :]) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return (h ^ (h >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CompositeExplicitAutograd")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments, **options):
        raise NotImplementedError(f"sgl_kernel.{name} has no stub")

    return missing
