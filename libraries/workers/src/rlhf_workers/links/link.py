"""A link carries buckets of weights from a trainer's ranks to a generator's processes, bypassing the driver.

Each rank of the trainer has a :class:`Sender`, each receiving process a :class:`Receiver`. For every bucket the sender
yields a :class:`BucketHeader`. The driver hands the header to every receiving process, and the receiver gets the
bucket's bytes over the link. There are two kinds of links:

``shared``: memory that both processes map, on GPUs by CUDA IPC. Each rank shares memory of its own device, so every
receiver must be on the device of a rank.

``broadcast``: one collective from rank 0 to all receivers, by NCCL on GPUs and gloo elsewhere. NCCL accepts each GPU
only once, so every receiver needs a separate device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from rlhf.weights.bucket import Bucket
from torch import Tensor

_ALIGNMENT = 64
"""In bytes; larger than any dtype requires."""


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The position of each tensor of a bucket in the buffer."""

    tensors: tuple[tuple[str, str, tuple[int, ...], int, int], ...]
    """(name, dtype, shape, first byte, number of bytes)."""
    fingerprints: tuple[str, ...]
    """The fingerprint of each tensor, computed by the sender."""
    nbytes: int
    """Size of the buffer, gaps included. At least 1, because some operations cannot move an empty buffer."""

    @classmethod
    def of(cls, bucket: Bucket) -> BucketLayout:
        tensors, end = [], 0
        for name, tensor in bucket.tensors:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + tensor.nbytes
            tensors.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start, tensor.nbytes))
        return cls(tuple(tensors), bucket.fingerprints, max(end, 1))

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


Kind = Literal["shared", "broadcast"]


@dataclass(frozen=True, slots=True)
class Link:
    """What every sender and receiver of a link needs to know."""

    kind: Kind
    address: str
    """``HOST:PORT`` of the key-value store through which both ends coordinate
    (:mod:`rlhf_workers.links.coordination`)."""
    receivers: int
    """Number of processes that receive every bucket."""
    ranks: int
    """Number of the trainer's ranks."""
    cuda: bool
    """Whether the devices are GPUs."""
    timeout: float
    """Seconds for one bucket."""

    @property
    def every_rank(self) -> bool:
        """Whether every rank of the trainer gets the whole tensors. With CUDA IPC, each rank serves the receivers on
        its own device. In an NCCL broadcast, the other ranks keep step with rank 0 for each bucket."""
        return self.cuda


@dataclass(frozen=True, slots=True)
class BucketHeader:
    """Describes one bucket whose bytes travel over a link. The driver receives the header instead of the bucket."""

    number: int
    """Number of the bucket, counted from 0 since the link was created."""
    layout: BucketLayout
    error: str = ""
    """Why the bytes will not arrive; empty if they will."""


class Sender(ABC):
    """One rank of the trainer on a link."""

    @abstractmethod
    def send(self, buckets: Iterator[Bucket]) -> Iterator[BucketHeader]:
        """Send each bucket and yield its header. Errors on the way are not raised here. The following headers carry
        them, and the receivers raise them. So the trainer survives the death of an engine."""

    def close(self) -> None:  # noqa: B027 - nothing to release is a valid answer
        """Release memory and connections."""


class Receiver(ABC):
    """One receiving process on a link."""

    @contextmanager
    @abstractmethod
    def open(self, header: BucketHeader) -> Iterator[Bucket]:
        """The bucket. Its memory is valid only inside the context. Raises SyncError if the bucket does not arrive."""

    def close(self) -> None:  # noqa: B027
        """Release memory and connections."""
