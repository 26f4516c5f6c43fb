"""The link ``broadcast``: one collective from rank 0 of the trainer to every receiver.

Rank 0 enters the collective when all receivers are ready. During the collective every process checks whether the driver
aborted the sync, so no process waits for a dead receiver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from rlhf.errors import SyncError
from rlhf.weights.bucket import Bucket
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo

from rlhf_workers.links.coordination import Coordination
from rlhf_workers.links.link import BucketHeader, BucketLayout, Link, Receiver, Sender

_READY = "ready"
"""Counter: every receiver adds 1 when it is ready for a bucket. Receivers read the buckets in order."""
_SEND_COUNT = "sent"
"""Counter: rank 0 adds 1 when it is done with a bucket, also if the bucket did not arrive."""


class BroadcastSender(Sender):
    """Rank 0 of the trainer."""

    def __init__(self, link: Link) -> None:
        self.link, self.coordination = link, Coordination.connect(link.address, link.timeout)
        self.device = torch.device("cuda", torch.cuda.current_device()) if link.cuda else torch.device("cpu")
        self.group = _group(link, self.coordination, 0, self.device)
        self._sent_count = 0
        self._error = ""

    def send(self, buckets: Iterator[Bucket]) -> Iterator[BucketHeader]:
        for bucket in buckets:
            number, self._sent_count = self._sent_count, self._sent_count + 1
            layout = BucketLayout.of(bucket)
            if self._error:
                yield BucketHeader(number, layout, self._error)
                self._count()
                continue
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.device)
            layout.write(bucket, buffer)
            # Receivers become ready when they get the header. So it is sent before the wait for them.
            yield BucketHeader(number, layout)
            try:
                self._broadcast(buffer, number)
            except (SyncError, RuntimeError) as error:  # a broken connection is a RuntimeError
                self._error = str(error)
            self._count()

    def _count(self) -> None:
        """Let the other ranks gather the next bucket."""
        if self.link.ranks > 1:
            with suppress(RuntimeError):  # the driver, which serves the store, is gone
                self.coordination.add(_SEND_COUNT)

    def _broadcast(self, buffer: Tensor, number: int) -> None:
        expected = self.link.receivers * (number + 1)
        self.coordination.wait_for_count(_READY, expected, "waiting for the engines to take a bucket")
        _broadcast(self.group, buffer, self.coordination)

    def close(self) -> None:
        _abort(self.group)


class IdleSender(Sender):
    """A rank other than 0. It takes part in gathering the weights but sends nothing.

    NCCL returns before a collective is done. On GPUs these ranks would therefore begin to gather all later buckets
    while rank 0 waits for the engines. The trainer's group would count that time and could end the ranks at its
    timeout. So they wait for rank 0 after each bucket. gloo returns when a collective is done; with gloo these ranks
    get no buckets.
    """

    def __init__(self, link: Link) -> None:
        # rank 0 waits for the engines, and then for the bytes
        self.coordination = Coordination.connect(link.address, 2 * link.timeout)
        self._taken_count = 0
        self._source_failed = False
        """The sync of rank 0 failed, so do not wait for it any more."""

    def send(self, buckets: Iterator[Bucket]) -> Iterator[BucketHeader]:
        for _ in buckets:
            self._taken_count += 1
            if self._source_failed:
                continue
            try:
                self.coordination.wait_for_count(_SEND_COUNT, self._taken_count, "waiting for rank 0 to send a bucket")
            except (SyncError, RuntimeError):  # rank 0 reports the cause; it still gathers with the other ranks
                self._source_failed = True
        # The driver reads the headers of rank 0 only.
        return iter(())


class BroadcastReceiver(Receiver):
    """One receiving process."""

    def __init__(self, link: Link, number: int, device: torch.device) -> None:
        self.device, self.coordination = device, Coordination.connect(link.address, link.timeout)
        self.group = _group(link, self.coordination, number + 1, device)

    @contextmanager
    def open(self, header: BucketHeader) -> Iterator[Bucket]:
        if header.error:
            raise SyncError(f"bucket {header.number} will not arrive: {header.error}")
        buffer = torch.empty(header.layout.nbytes, dtype=torch.uint8, device=self.device)
        try:
            self.coordination.add(_READY)
            _broadcast(self.group, buffer, self.coordination)
        except RuntimeError as error:
            raise SyncError(f"bucket {header.number} did not arrive: {error}") from error
        yield header.layout.read(buffer)

    def close(self) -> None:
        _abort(self.group)


def _group(link: Link, coordination: Coordination, rank: int, device: torch.device) -> Any:
    """A connected process group for this link alone; rank 0 sends. All processes must make it at the same time: each
    waits for all others. Raises SyncError when the driver aborts the sync meanwhile."""
    # A separate connection: while one thread waits in a store, no other thread can poll through the same connection.
    store, size = PrefixStore("group", Coordination.connect(link.address, link.timeout).store), link.receivers + 1
    limit = timedelta(seconds=link.timeout)

    def connect() -> Any:
        if not link.cuda:
            return ProcessGroupGloo(store, rank, size, limit)
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)  # of this thread
        options = ProcessGroupNCCL.Options()
        # NCCL ends a process after this time. Before that the polls of `_broadcast` end the wait with an error.
        options._timeout = 2 * limit
        group = ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(device)  # otherwise the first broadcast connects, and cannot be aborted
        return group

    return coordination.run_abortable(connect, "connecting the ends of the link")


def _broadcast(group: Any, buffer: Tensor, coordination: Coordination) -> None:
    """Broadcast from rank 0. Raises SyncError when the driver aborts the sync, RuntimeError on a broken connection."""
    work = group.broadcast([buffer])
    try:
        coordination.wait_until(work.is_completed, "broadcasting a bucket")
    except SyncError:
        group.abort()
        raise
    work.wait()
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)


def _abort(group: Any) -> None:
    """Close the connections without waiting for processes that are gone."""
    with suppress(RuntimeError):  # the connection is broken already
        group.abort()
