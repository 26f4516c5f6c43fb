"""The interface of generators that receive weights over a link."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from rlhf.interfaces import TakesTensors

if TYPE_CHECKING:
    from rlhf.weights.bucket import Bucket

    from rlhf_workers.links.link import BucketHeader, Link


class ReceivesOverLinks(TakesTensors):
    """The processes of a generator get tensors directly from the trainer's processes. After the launcher has called
    :meth:`connect`, ``take`` and ``stale`` receive headers instead of buckets::

        class MyGenerator(ReceivesOverLinks, Generator): ...
    """

    @abstractmethod
    def receivers(self) -> int:
        """Number of processes of this engine that receive weights. Each connects to the link."""

    @abstractmethod
    def connect(self, link: Link, first: int) -> None:
        """Connect every receiving process to ``link``, in place of an earlier link.

        Args:
            first: number of this engine's first receiving process, counted over all engines.
        """

    @abstractmethod
    def take(self, bucket: Bucket | BucketHeader) -> None:
        """Same as :meth:`rlhf.interfaces.TakesTensors.take`. Each receiving process opens each header exactly once."""

    @abstractmethod
    def stale(self, bucket: Bucket | BucketHeader) -> list[str]:
        """Same as :meth:`rlhf.interfaces.TakesTensors.stale`. Each receiving process opens each header exactly once."""
