"""Links: how buckets get from a trainer to the processes that take them without passing through the driver.

A trainer's :class:`Outlet` turns each bucket into a :class:`Shipment`, which travels in the bucket's place; the
:class:`Inlet` of a receiver turns that back into the bucket. What is in between is one of two:

``shared``: memory that both processes map, on a GPU by CUDA IPC. Each rank lends the memory of its own device, so the
ranks and the receivers must have the same devices.

``broadcast``: one collective from rank 0 to all receivers, by NCCL on GPUs and gloo elsewhere. No GPU can be in it
twice, so the receivers must have devices of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rlhf.weights.bucket import Bucket

from rlhf_transport.layout import Layout

Kind = Literal["shared", "broadcast"]


@dataclass(frozen=True, slots=True)
class Link:
    """What every end of a link is told."""

    kind: Kind
    address: str
    """``HOST:PORT`` of the store where the ends agree on whose turn it is (:mod:`rlhf_transport.coordination`)."""
    receivers: int
    """Processes that take every bucket."""
    ranks: int
    """Of the trainer."""
    cuda: bool
    """Whether the devices are GPUs."""
    timeout: float
    """Seconds for one bucket."""

    @property
    def everywhere(self) -> bool:
        """Whether every rank of the trainer needs the whole tensors: each serves the receivers on its own device."""
        return self.kind == "shared" and self.cuda


@dataclass(frozen=True, slots=True)
class Shipment:
    """What travels in a bucket's place."""

    number: int
    """Of the bucket, since the link was made."""
    layout: Layout
    lost: str = ""
    """Why the bytes do not come any more; empty: they do."""


class Outlet(ABC):
    """The trainer's end; one per rank."""

    @abstractmethod
    def carry(self, buckets: Iterator[Bucket]) -> Iterator[Shipment]:
        """Ship each bucket. What goes wrong on the way is for the receivers to report: the shipments that follow say
        that they are lost, so that a trainer outlives an engine that was killed."""

    def close(self) -> None:  # noqa: B027 - nothing to release is a valid answer
        """Release memory and connections."""


class Inlet(ABC):
    """A receiver's end."""

    @contextmanager
    @abstractmethod
    def open(self, shipment: Shipment) -> Iterator[Bucket]:
        """The bucket; its memory is valid inside only. SyncError where it does not arrive."""

    def close(self) -> None:  # noqa: B027
        """Release memory and connections."""
