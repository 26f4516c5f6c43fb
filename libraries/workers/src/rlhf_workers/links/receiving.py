"""The interface of generators that receive weights over a link."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rlhf.interfaces import Generator

if TYPE_CHECKING:
    from rlhf.weights.bucket import Bucket

    from rlhf_workers.links.link import BucketHeader, Link

LINKS = "accept:links"
"""Capability of a generator that implements :class:`ReceivesOverLinks`."""


class ReceivesOverLinks(ABC):
    """A base class for generators beside :class:`rlhf.interfaces.Generator`.

    A generator that implements it says so by the capability ``accept:links``. Its launcher calls :meth:`connect`; from
    then on ``take`` and ``stale`` are given headers in place of buckets::

        class MyGenerator(ReceivesOverLinks, Generator):
            capabilities = frozenset({"accept:tensors", "accept:links"})
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
        """As :meth:`rlhf.interfaces.Generator.take`. Each receiving process opens each header exactly once."""

    @abstractmethod
    def stale(self, bucket: Bucket | BucketHeader) -> list[str]:
        """As :meth:`rlhf.interfaces.Generator.stale`. Each receiving process opens each header exactly once."""


def receives_over_links(generator: type[Generator]) -> bool:
    """Whether a generator has the capability ``accept:links``."""
    return LINKS in generator.capabilities
