"""Both ends of a link: connecting a trainer's rank and a receiving process to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rlhf.interfaces import SendsWeights

from rlhf_workers.links.broadcast import BroadcastReceiver, BroadcastSender, IdleSender
from rlhf_workers.links.link import BucketHeader, Link, Receiver, Sender
from rlhf_workers.links.shared_memory import SharedMemoryReceiver, SharedMemorySender


class ConnectedTrainer:
    """One rank of a trainer with its end of a link. Every rank is connected and must call :meth:`send_buckets`.
    Connecting waits for the other ends if this kind of link requires it."""

    def __init__(self, trainer: SendsWeights, link: Link) -> None:
        self._trainer, self._link = trainer, link
        self._sender = connect_sender(link, trainer.spec.rank)

    def send_buckets(self, view: str, limit: int) -> Iterator[BucketHeader]:
        """Send the buckets of :meth:`SendsWeights.buckets`, and yield their headers."""
        yield from self._sender.send(self._trainer.buckets(view, limit, self._link.every_rank))

    def close(self) -> None:
        """Release memory and connections."""
        self._sender.close()


def connect_sender(link: Link, rank: int) -> Sender:
    """The sending end of rank ``rank`` of the trainer. Waits for the other ends if this kind of link requires it."""
    if link.kind == "shared":
        return SharedMemorySender(link, rank)
    return BroadcastSender(link) if rank == 0 else IdleSender(link)


def connect_receiver(link: Link, number: int, device: torch.device) -> Receiver:
    """The receiving end of process ``number`` (from 0), with tensors on ``device``."""
    if link.kind == "shared":
        return SharedMemoryReceiver(link, device)
    return BroadcastReceiver(link, number, device)
