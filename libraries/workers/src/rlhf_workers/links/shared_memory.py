"""The link ``shared``: buckets in memory that is mapped by the trainer and by the receivers on its device.

Each rank of the trainer has two buffers. It fills one while the receivers read the other. It reuses a buffer only when
all receivers are done with it. On GPUs a buffer is shared by its CUDA IPC handle. On the host it is an anonymous file
(memfd), which receivers open through the trainer's ``/proc`` entry, so a killed process leaves nothing behind.

torch counts the exports of a GPU buffer and the released mappings, and frees the buffer only at the last release. So
each bucket has one export, one mapping and one release. A receiver reports that it is done after its release, so the
memory is free for its next owner.
"""

from __future__ import annotations

import base64
import inspect
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
from torch.multiprocessing import reductions

from rlhf_workers.links.coordination import Coordination
from rlhf_workers.links.link import BucketHeader, BucketLayout, Link, Receiver, Sender

REBUILT = tuple(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
"""The arguments of the torch function that maps a tensor of another process."""
HANDLE_FIELDS = (
    "storage_handle", "storage_size_bytes", "storage_offset_bytes", "ref_counter_handle", "ref_counter_offset",
    "event_handle", "event_sync_required",
)  # fmt: skip
"""The arguments that the receiver does not know."""
_BUFFERS = 2
_HOST = "host"
_DONE = "done"
"""Counter: every receiver adds 1 when it is done with a bucket. Receivers read the buckets in order."""


class SharedMemorySender(Sender):
    """One rank of the trainer."""

    def __init__(self, link: Link, rank: int) -> None:
        self.link, self.coordination = link, Coordination.connect(link.address, link.timeout)
        self.serves = link.cuda or rank == 0
        """On a CPU all ranks share one device, so only rank 0 serves the receivers."""
        self._buffers: list[SharedBuffer | None] = [None] * _BUFFERS
        self._keys: dict[int, str] = {}
        """{bucket number: key of its published handle}, of buckets that a receiver may still read."""
        self._sent_count = 0
        self._error = ""

    def send(self, buckets: Iterator[Bucket]) -> Iterator[BucketHeader]:
        first = self._sent_count
        for bucket in buckets:
            number, self._sent_count = self._sent_count, self._sent_count + 1
            layout = BucketLayout.of(bucket)
            if self.serves and not self._error:
                self._publish(bucket, layout, number, first)
            yield BucketHeader(number, layout, self._error)
        for number in range(max(first, self._sent_count - _BUFFERS), self._sent_count):
            self._wait(number)
        self.close()  # other work needs the memory between two syncs

    def _publish(self, bucket: Bucket, layout: BucketLayout, number: int, first: int) -> None:
        """Copy a bucket into a buffer that is free, and publish the buffer's handle."""
        slot = number % _BUFFERS
        if number - first >= _BUFFERS:
            self._wait(number - _BUFFERS)
        if self._error:
            return
        buffer = self._buffers[slot]
        if buffer is None or buffer.memory.numel() < layout.nbytes:
            if buffer is not None:
                buffer.close()
            buffer = self._buffers[slot] = SharedBuffer(layout.nbytes, self.link.cuda)
        layout.write(bucket, buffer.memory)
        if buffer.memory.is_cuda:
            torch.cuda.synchronize(buffer.memory.device)
        key = f"handle {number} {_device_key(buffer.memory.device)}"
        self.coordination.publish(key, buffer.handle())
        self._keys[number] = key

    def _wait(self, number: int) -> None:
        """Wait until every receiver is done with a bucket."""
        if self._error or not self.serves:
            return
        try:
            expected = self.link.receivers * (number + 1)
            self.coordination.wait_for_count(_DONE, expected, "waiting for the engines to take a bucket")
        except SyncError as error:
            self._error = str(error)
        else:
            # Otherwise the store would keep one handle per bucket for the whole run.
            self.coordination.delete(self._keys.pop(number))

    def close(self) -> None:
        for buffer in self._buffers:
            if buffer is not None:
                buffer.close()
        self._buffers = [None] * _BUFFERS
        if self.link.cuda:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()


class SharedMemoryReceiver(Receiver):
    """One receiving process."""

    def __init__(self, link: Link, device: torch.device) -> None:
        self.device, self.coordination = device, Coordination.connect(link.address, link.timeout)

    @contextmanager
    def open(self, header: BucketHeader) -> Iterator[Bucket]:
        if header.error:
            raise SyncError(f"bucket {header.number} will not arrive: {header.error}")
        key = f"handle {header.number} {_device_key(self.device)}"
        handle = self.coordination.read(key, f"waiting for a rank of the trainer on {self.device}")
        bucket = header.layout.read(_open_handle(handle, self.device))
        try:
            yield bucket
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # all reads end before the sender fills the buffer again
        finally:
            bucket.release()
        self.coordination.add(_DONE)


class SharedBuffer:
    """Memory of the trainer that receivers can map."""

    def __init__(self, nbytes: int, cuda: bool) -> None:
        self._file = -1
        if cuda:
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        else:
            self._file = os.memfd_create("rlhf-sync")
            os.ftruncate(self._file, nbytes)
            self.memory = _map(self._file, nbytes)

    def handle(self) -> str:
        """The data that another process needs to map the memory, as JSON. It is not a pickle, because it passes through
        a store on the network."""
        if self._file >= 0:
            return json.dumps([os.getpid(), self._file, self.memory.numel()])
        _, arguments = reductions.reduce_tensor(self.memory)
        parts = [part for name, part in zip(REBUILT, arguments, strict=True) if name in HANDLE_FIELDS]
        return json.dumps([{"b": base64.b64encode(p).decode()} if isinstance(p, bytes) else p for p in parts])

    def close(self) -> None:
        """Release the memory. It is freed when no receiver maps it any more."""
        del self.memory
        if self._file >= 0:
            os.close(self._file)


def _open_handle(handle: str, device: torch.device) -> Tensor:
    """uint8 [nbytes]: the memory that the handle refers to. Raises SyncError if the system does not allow the
    mapping."""
    parts = json.loads(handle)
    try:
        return _map_device(parts, device) if device.type == "cuda" else _map_host(*parts)
    except (OSError, RuntimeError) as error:
        raise SyncError(
            f"this process cannot map the memory of a rank of the trainer ({type(error).__name__}: {error}). Both must "
            "run as the same user, in the same process and IPC namespaces, and the system must allow them to read each "
            "other (ptrace rules; on GPUs only if PYTORCH_ALLOC_CONF has expandable_segments). Otherwise, set "
            "sync.transport = 'store'."
        ) from error


def _map_host(process: int, number: int, nbytes: int) -> Tensor:
    # Writable, although it is only read: torch warns if it makes a tensor of read-only memory.
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    try:
        return _map(file, nbytes)
    finally:
        os.close(file)


def _map_device(parts: list[Any], device: torch.device) -> Tensor:
    torch.cuda.init()
    handle = dict(
        zip(HANDLE_FIELDS, (base64.b64decode(p["b"]) if isinstance(p, dict) else p for p in parts), strict=True)
    )
    nbytes: Any = handle["storage_size_bytes"]
    tensor = {
        "tensor_cls": Tensor,
        "tensor_size": torch.Size([nbytes]),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": torch.cuda.current_device() if device.index is None else device.index,
        "requires_grad": False,
    }
    memory: Tensor = reductions.rebuild_cuda_tensor(**tensor, **handle)
    return memory


def _map(file: int, nbytes: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(file, nbytes), dtype=np.uint8))


def _device_key(device: torch.device) -> str:
    """A name of the device that is the same in every process, whatever its index there."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else _HOST
