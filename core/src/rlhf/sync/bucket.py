"""Buckets of named tensors, and the fingerprint by which a receiver shows what arrived.

A bucket that is pickled with protocol 5 hands its bytes over out of band, so an object store holds them once and a
reader on the same machine maps them without a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from rlhf.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some of a model's tensors. In the sender's process they share memory with the model."""

    tensors: tuple[tuple[str, Tensor], ...]
    """(Hugging Face name, tensor)."""
    fingerprints: tuple[str, ...]
    """Of each tensor, computed by the sender."""

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for _, t in self.tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        named = [(name, _bytes(t), str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self.tensors]
        return _restore, (named, self.fingerprints)

    def received(self) -> dict[str, str]:
        """{name: fingerprint} of the bytes as they are here, computed now."""
        return {name: fingerprint(tensor) for name, tensor in self.tensors}


def buckets(weights: Iterable[tuple[str, Tensor]], limit: int, sent: dict[str, str]) -> Iterator[Bucket]:
    """Group ``weights``, in order, into buckets of at most ``limit`` bytes; a larger tensor is alone in its own.

    ``sent`` is filled with the fingerprint of every tensor: what a receiver of all buckets must show.
    """
    if limit < 1:
        raise TrainingError(f"a bucket of {limit} bytes holds nothing; the limit must be at least 1")
    held: list[tuple[str, Tensor]] = []
    size = 0

    def full() -> Bucket:
        marks = tuple(fingerprint(tensor) for _, tensor in held)
        sent.update(zip((name for name, _ in held), marks, strict=True))
        return Bucket(tuple(held), marks)

    for name, tensor in weights:
        if held and size + tensor.nbytes > limit:
            yield full()
            held, size = [], 0
        held.append((name, tensor.detach()))
        size += tensor.nbytes
    if held:
        yield full()


def fingerprint(tensor: Tensor) -> str:
    """XXH3 (64 bits, hexadecimal) of dtype, shape and bytes; a tensor of a device is copied to the host for it."""
    state = xxhash.xxh3_64(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    state.update(_bytes(tensor).data)
    return state.hexdigest()


def _bytes(tensor: Tensor) -> np.ndarray:
    """uint8 [nbytes] over the tensor's own memory where it is contiguous and on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _restore(named: list[tuple[str, np.ndarray, str, tuple[int, ...]]], fingerprints: tuple[str, ...]) -> Bucket:
    tensors = []
    with warnings.catch_warnings():  # mapped memory is read-only; nothing here writes to it
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, data, dtype, shape in named:
            tensors.append((name, torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)))
    return Bucket(tuple(tensors), fingerprints)
