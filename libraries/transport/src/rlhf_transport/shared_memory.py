"""The link ``shared``: buckets in memory that the trainer and the receivers on its device map both.

Each rank of the trainer has two pieces of memory and fills one while the receivers read the other; it fills a piece
again once all of them are done with it. On GPUs the handle of the memory is one of CUDA IPC; on the host it is a file
without a name, opened through the trainer's own list of open files, so whoever is killed leaves nothing behind.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from rlhf.errors import SyncError
from rlhf.weights.bucket import Bucket
from torch import Tensor

from rlhf_transport.coordination import Meeting
from rlhf_transport.layout import Layout
from rlhf_transport.link import Inlet, Link, Outlet, Shipment

_PIECES = 2
_HOST = "host"
_DONE = "done"
"""How often a receiver was done with a bucket: they take them one after another."""


class SharedOutlet(Outlet):
    """One rank of the trainer."""

    def __init__(self, link: Link, rank: int) -> None:
        self.link, self.meeting = link, Meeting.at(link.address, link.timeout)
        self.serves = link.cuda or rank == 0
        """On CPUs all ranks have the same memory: one of them is enough."""
        self._pieces: list[Piece | None] = [None] * _PIECES
        self._handles: dict[int, str] = {}
        """{bucket: key} of what is published and not done with."""
        self._shipped = 0
        self._lost = ""

    def carry(self, buckets: Iterator[Bucket]) -> Iterator[Shipment]:
        first = self._shipped
        for bucket in buckets:
            number, self._shipped = self._shipped, self._shipped + 1
            layout = Layout.of(bucket)
            if self.serves and not self._lost:
                self._offer(bucket, layout, number, first)
            yield Shipment(number, layout, self._lost)
        for number in range(max(first, self._shipped - _PIECES), self._shipped):
            self._wait(number)
        self.close()  # the memory is needed for other things between two syncs

    def _offer(self, bucket: Bucket, layout: Layout, number: int, first: int) -> None:
        slot = number % _PIECES
        if number - first >= _PIECES:
            self._wait(number - _PIECES)
        if self._lost:
            return
        piece = self._pieces[slot]
        if piece is None or piece.memory.numel() < layout.nbytes:
            if piece is not None:
                piece.close()
            piece = self._pieces[slot] = Piece(layout.nbytes, self.link.cuda)
        layout.write(bucket, piece.memory)
        if piece.memory.is_cuda:
            torch.cuda.synchronize(piece.memory.device)
        key = f"handle {number} {_device_key(piece.memory.device)}"
        self.meeting.publish(key, piece.handle())
        self._handles[number] = key

    def _wait(self, number: int) -> None:
        """Until every receiver is done with a bucket."""
        if self._lost or not self.serves:
            return
        try:
            expected = self.link.receivers * (number + 1)
            self.meeting.reached(_DONE, expected, "waiting for the engines to take a bucket")
        except SyncError as error:
            self._lost = str(error)
        else:
            self.meeting.forget(self._handles.pop(number))

    def close(self) -> None:
        for piece in self._pieces:
            if piece is not None:
                piece.close()
        self._pieces = [None] * _PIECES
        if self.link.cuda:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


class SharedInlet(Inlet):
    """One receiver."""

    def __init__(self, link: Link, device: torch.device) -> None:
        self.device, self.meeting = device, Meeting.at(link.address, link.timeout)

    @contextmanager
    def open(self, shipment: Shipment) -> Iterator[Bucket]:
        if shipment.lost:
            raise SyncError(f"bucket {shipment.number} does not come: {shipment.lost}")
        key = f"handle {shipment.number} {_device_key(self.device)}"
        piece = _mapped(self.meeting.read(key, f"waiting for a rank of the trainer on {self.device}"), self.device)
        yield shipment.layout.read(piece)
        if piece.is_cuda:
            torch.cuda.synchronize(piece.device)  # everything was read before the memory is filled again
        self.meeting.add(_DONE)


class Piece:
    """Memory of the trainer's that receivers can map."""

    def __init__(self, nbytes: int, cuda: bool) -> None:
        self._file = -1
        if cuda:
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        else:
            self._file = os.memfd_create("rlhf-sync")
            os.ftruncate(self._file, nbytes)
            self.memory = _map(self._file, nbytes)

    def handle(self) -> str:
        """What another process needs: JSON, no pickle, as it passes through a store on the network."""
        if self._file >= 0:
            return json.dumps([os.getpid(), self._file, self.memory.numel()])
        storage: Any = self.memory.untyped_storage()
        parts = storage._share_cuda_()[1:]
        return json.dumps([{"b": base64.b64encode(p).decode()} if isinstance(p, bytes) else p for p in parts])

    def close(self) -> None:
        """Give the memory back, as far as no receiver has it mapped."""
        del self.memory
        if self._file >= 0:
            os.close(self._file)


def _mapped(handle: str, device: torch.device) -> Tensor:
    """uint8 over the memory of a handle."""
    parts = json.loads(handle)
    if device.type != "cuda":
        process, number, nbytes = parts
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        try:
            return _map(file, nbytes)
        finally:
            os.close(file)
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    arguments = [base64.b64decode(p["b"]) if isinstance(p, dict) else p for p in parts]
    storage = torch.UntypedStorage._new_shared_cuda(index, *arguments)
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)


def _map(file: int, nbytes: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(file, nbytes), dtype=np.uint8))


def _device_key(device: torch.device) -> str:
    """The same in all processes that see the device, under whatever number."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else _HOST
