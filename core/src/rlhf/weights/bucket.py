"""Buckets of named tensors.

A bucket that is pickled with protocol 5 passes its bytes out of band, so an object store holds them once, and a reader
on the same machine maps them without a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rlhf.errors import TrainingError
from rlhf.weights.fingerprint import host_bytes, marks
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some of a model's tensors. In the sender's process they share memory with the model."""

    tensors: tuple[tuple[str, Tensor], ...]
    """(Hugging Face name, tensor)."""
    fingerprints: tuple[str, ...]
    """Fingerprint of each tensor, computed by the sender."""

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for _, t in self.tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        entries = [
            (name, host_bytes(t), str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self.tensors
        ]
        return _restore, (entries, self.fingerprints)

    def release(self) -> None:
        """Drop the tensors, whose memory is no longer valid. References to the bucket then keep none of it alive."""
        object.__setattr__(self, "tensors", ())

    def received(self) -> dict[str, str]:
        """{name: fingerprint}, computed now from the bytes in this process, of the same kind as the sender's."""
        fingerprints = marks([tensor for _, tensor in self.tensors], next(iter(self.fingerprints), ""))
        return dict(zip((name for name, _ in self.tensors), fingerprints, strict=True))


def buckets(weights: Iterable[tuple[str, Tensor]], limit: int, fingerprints: dict[str, str]) -> Iterator[Bucket]:
    """Group ``weights``, in order, into buckets of at most ``limit`` bytes. A larger tensor gets its own bucket.

    ``fingerprints`` is filled with the fingerprint of every tensor. A receiver of all buckets must report the same.
    """
    if limit < 1:
        raise TrainingError(f"a bucket of {limit} bytes holds nothing; the limit must be at least 1")
    tensors: list[tuple[str, Tensor]] = []
    size = 0

    def full() -> Bucket:
        digests = marks([tensor for _, tensor in tensors])
        fingerprints.update(zip((name for name, _ in tensors), digests, strict=True))
        return Bucket(tuple(tensors), tuple(digests))

    for name, tensor in weights:
        if tensors and size + tensor.nbytes > limit:
            yield full()
            tensors, size = [], 0
        tensors.append((name, tensor.detach()))
        size += tensor.nbytes
    if tensors:
        yield full()


def _restore(entries: list[tuple[str, np.ndarray, str, tuple[int, ...]]], fingerprints: tuple[str, ...]) -> Bucket:
    tensors = []
    with warnings.catch_warnings():  # mapped memory is read-only; nothing here writes to it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, data, dtype, shape in entries:
            tensors.append((name, torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)))
    return Bucket(tuple(tensors), fingerprints)
