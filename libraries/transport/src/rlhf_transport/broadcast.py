"""The link ``broadcast``: one collective from rank 0 of the trainer to every receiver.

Rank 0 enters the collective when all receivers are ready. During the collective every process polls whether the driver
aborted the sync, so no process waits for a receiver that died.
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

from rlhf_transport.coordination import Coordination
from rlhf_transport.layout import Layout
from rlhf_transport.link import BucketHeader, Link, Receiver, Sender

_READY = "ready"
"""Counter: every receiver adds 1 when it is ready for a bucket. Receivers take the buckets in order."""


class BroadcastSender(Sender):
    """Rank 0 of the trainer."""

    def __init__(self, link: Link) -> None:
        self.link, self.coordination = link, Coordination.connect(link.address, link.timeout)
        self.device = torch.device("cuda", torch.cuda.current_device()) if link.cuda else torch.device("cpu")
        self.group = _group(link, self.coordination, 0)
        self._sent = 0
        self._error = ""

    def send(self, buckets: Iterator[Bucket]) -> Iterator[BucketHeader]:
        for bucket in buckets:
            number, self._sent = self._sent, self._sent + 1
            layout = Layout.of(bucket)
            if self._error:
                yield BucketHeader(number, layout, self._error)
                continue
            buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.device)
            layout.write(bucket, buffer)
            yield BucketHeader(number, layout)
            try:
                self._broadcast(buffer, number)
            except (SyncError, RuntimeError) as error:  # a broken connection is a RuntimeError
                self._error = str(error)

    def _broadcast(self, buffer: Tensor, number: int) -> None:
        expected = self.link.receivers * (number + 1)
        self.coordination.wait_for_count(_READY, expected, "waiting for the engines to take a bucket")
        _broadcast(self.group, buffer, self.coordination)

    def close(self) -> None:
        _abort(self.group)


class IdleSender(Sender):
    """Every rank but 0: it takes part in gathering the weights and sends nothing."""

    def send(self, buckets: Iterator[Bucket]) -> Iterator[BucketHeader]:
        for _ in buckets:
            pass
        return iter(())


class BroadcastReceiver(Receiver):
    """One receiving process."""

    def __init__(self, link: Link, number: int, device: torch.device) -> None:
        self.device, self.coordination = device, Coordination.connect(link.address, link.timeout)
        self.group = _group(link, self.coordination, number + 1)

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


def _group(link: Link, coordination: Coordination, rank: int) -> Any:
    """A process group for this link alone; rank 0 sends. All processes must make it at the same time: each waits for
    all others. Raises SyncError when the driver aborts the sync meanwhile."""
    # Its own connection: while one thread waits in a store, no other thread can poll through the same connection.
    store, size = PrefixStore("group", Coordination.connect(link.address, link.timeout).store), link.receivers + 1
    limit = timedelta(seconds=link.timeout)
    if not link.cuda:
        return coordination.run_abortable(
            lambda: ProcessGroupGloo(store, rank, size, limit), "connecting the ends of the link"
        )
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    return ProcessGroupNCCL(store, rank, size, options)


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
