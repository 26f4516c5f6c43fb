"""The link ``broadcast``: one collective from rank 0 of the trainer to every receiver.

Rank 0 enters it once all receivers have said that they are there, and while it is under way everybody looks whether it
was given up. So the death of a receiver ends the others' wait, at the latest by the driver's word.
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

from rlhf_transport.coordination import Meeting
from rlhf_transport.layout import Layout
from rlhf_transport.link import Inlet, Link, Outlet, Shipment

_THERE = "there"
"""How often a receiver was ready for a bucket: they take them one after another."""


class BroadcastOutlet(Outlet):
    """Rank 0 of the trainer."""

    def __init__(self, link: Link) -> None:
        self.link, self.meeting = link, Meeting.at(link.address, link.timeout)
        self.device = torch.device("cuda", torch.cuda.current_device()) if link.cuda else torch.device("cpu")
        self.group = _group(link, self.meeting, 0)
        self._shipped = 0
        self._lost = ""

    def carry(self, buckets: Iterator[Bucket]) -> Iterator[Shipment]:
        for bucket in buckets:
            number, self._shipped = self._shipped, self._shipped + 1
            layout = Layout.of(bucket)
            if self._lost:
                yield Shipment(number, layout, self._lost)
                continue
            flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.device)
            layout.write(bucket, flat)
            yield Shipment(number, layout)
            try:
                self._send(flat, number)
            except (SyncError, RuntimeError) as error:  # a connection that broke is a RuntimeError
                self._lost = str(error)

    def _send(self, flat: Tensor, number: int) -> None:
        expected = self.link.receivers * (number + 1)
        self.meeting.reached(_THERE, expected, "waiting for the engines to take a bucket")
        _move(self.group, flat, self.meeting)

    def close(self) -> None:
        _leave(self.group)


class Silent(Outlet):
    """Other ranks take part in gathering the weights and send nothing."""

    def carry(self, buckets: Iterator[Bucket]) -> Iterator[Shipment]:
        for _ in buckets:
            pass
        return iter(())


class BroadcastInlet(Inlet):
    """One receiver."""

    def __init__(self, link: Link, number: int, device: torch.device) -> None:
        self.device, self.meeting = device, Meeting.at(link.address, link.timeout)
        self.group = _group(link, self.meeting, number + 1)

    @contextmanager
    def open(self, shipment: Shipment) -> Iterator[Bucket]:
        if shipment.lost:
            raise SyncError(f"bucket {shipment.number} does not come: {shipment.lost}")
        flat = torch.empty(shipment.layout.nbytes, dtype=torch.uint8, device=self.device)
        try:
            self.meeting.add(_THERE)
            _move(self.group, flat, self.meeting)
        except RuntimeError as error:
            raise SyncError(f"bucket {shipment.number} did not arrive: {error}") from error
        yield shipment.layout.read(flat)

    def close(self) -> None:
        _leave(self.group)


def _group(link: Link, meeting: Meeting, rank: int) -> Any:
    """A process group beside those that the processes have; rank 0 sends. All ends make theirs at the same time, and
    each waits for all others. SyncError where that is given up."""
    # a connection of its own: while one thread waits in a store, no other can look whether the sync was given up
    store, size = PrefixStore("group", Meeting.at(link.address, link.timeout).store), link.receivers + 1
    limit = timedelta(seconds=link.timeout)
    if not link.cuda:
        return meeting.leaving_behind(lambda: ProcessGroupGloo(store, rank, size, limit), "the ends of the link met")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    return ProcessGroupNCCL(store, rank, size, options)


def _move(group: Any, flat: Tensor, meeting: Meeting) -> None:
    """Broadcast from rank 0. SyncError where it was given up, RuntimeError where a connection broke."""
    work = group.broadcast([flat])
    try:
        meeting.until(work.is_completed, "a bucket was on its way")
    except SyncError:
        group.abort()
        raise
    work.wait()
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)


def _leave(group: Any) -> None:
    """End the connections without waiting for ends that are gone."""
    with suppress(RuntimeError):  # broken already
        group.abort()
