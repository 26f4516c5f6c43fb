"""The layout of a bucket's tensors in one contiguous buffer, so that one operation moves them all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rlhf.weights.bucket import Bucket
from torch import Tensor

_ALIGNMENT = 64
"""Bytes; more than any dtype needs."""


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Where each tensor of a bucket lies in the buffer."""

    tensors: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    """(name, dtype, shape, first byte, number of bytes)."""
    fingerprints: tuple[str, ...]
    """Of each tensor, computed by the sender."""
    nbytes: int
    """Size of the buffer, gaps included. At least 1, because some operations cannot move an empty buffer."""

    @classmethod
    def of(cls, bucket: Bucket) -> BucketLayout:
        placed, end = [], 0
        for name, tensor in bucket.tensors:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + tensor.nbytes
            placed.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start, tensor.nbytes))
        return cls(tuple(placed), bucket.fingerprints, max(end, 1))

    @torch.no_grad()
    def write(self, bucket: Bucket, buffer: Tensor) -> None:
        """Copy the bucket's tensors into ``buffer``, uint8 [at least nbytes], on any device."""
        for view, (_, tensor) in zip(self._views(buffer), bucket.tensors, strict=True):
            view.copy_(tensor)

    def read(self, buffer: Tensor) -> Bucket:
        """The bucket. Its tensors share the memory of ``buffer``."""
        tensors = zip((name for name, *_ in self.tensors), self._views(buffer), strict=True)
        return Bucket(tuple(tensors), self.fingerprints)

    def _views(self, buffer: Tensor) -> list[Tensor]:
        return [
            buffer[start : start + size].view(getattr(torch, dtype)).reshape(shape)
            for _, dtype, shape, start, size in self.tensors
        ]
