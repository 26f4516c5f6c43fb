"""A bucket's tensors laid out in one run of bytes, so that one operation moves them all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rlhf.weights.bucket import Bucket
from torch import Tensor

_ALIGNMENT = 64
"""Bytes; more than any dtype needs."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor of a bucket lies."""

    tensors: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    """(name, dtype, shape, first byte, bytes)."""
    fingerprints: tuple[str, ...]
    nbytes: int
    """Of the whole run, gaps included; at least 1, as there are operations that cannot move nothing."""

    @classmethod
    def of(cls, bucket: Bucket) -> Layout:
        placed, end = [], 0
        for name, tensor in bucket.tensors:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + tensor.nbytes
            placed.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start, tensor.nbytes))
        return cls(tuple(placed), bucket.fingerprints, max(end, 1))

    @torch.no_grad()
    def write(self, bucket: Bucket, flat: Tensor) -> None:
        """Copy the tensors to their places in ``flat``, uint8 [at least nbytes], on any device."""
        for view, (_, tensor) in zip(self._views(flat), bucket.tensors, strict=True):
            view.copy_(tensor)

    def read(self, flat: Tensor) -> Bucket:
        """The bucket, over the memory of ``flat``."""
        named = zip((name for name, *_ in self.tensors), self._views(flat), strict=True)
        return Bucket(tuple(named), self.fingerprints)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[start : start + size].view(getattr(torch, dtype)).reshape(shape)
            for _, dtype, shape, start, size in self.tensors
        ]
