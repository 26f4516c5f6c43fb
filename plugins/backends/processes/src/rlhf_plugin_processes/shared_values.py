"""Values in transit between processes: small values as bytes, large values in anonymous shared memory (memfd).

The memory has no name in any file system. It is passed as a file descriptor over a Unix socket. It is freed when the
last process has closed it, even if processes are killed.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import cloudpickle
from rlhf_workers.process.payload import INLINE, Stored

_ALIGNMENT = 64
"""In bytes; larger than any dtype requires."""


class Descriptor:
    """A file descriptor of this process. It is closed with the object."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class SharedValue(Stored):
    """A pickled value and its buffers, one after another. Reading it copies no buffers; they are read-only."""

    def __init__(self, sizes: Sequence[int], content: bytes | Descriptor, children: Sequence[Descriptor] = ()) -> None:
        """
        Args:
            sizes: bytes of the pickle stream, and of each buffer.
            content: all of them, each padded to 64 bytes.
            children: descriptors that the pickle stream refers to, because the value contains other shared values.
        """
        self.sizes, self.content, self.children = tuple(sizes), content, tuple(children)

    @classmethod
    def of(cls, value: Any) -> SharedValue:
        buffers: list[memoryview] = []
        file = io.BytesIO()
        pickler = _SharedValuePickler(file, protocol=5, buffer_callback=lambda b: buffers.append(b.raw()))
        pickler.dump(value)
        parts = [file.getbuffer(), *buffers]
        sizes = [part.nbytes for part in parts]
        *starts, end = accumulate(map(_padded, sizes), initial=0)
        memory: bytearray | mmap.mmap
        descriptor: Descriptor | None = None
        if end < INLINE:
            memory = bytearray(end)
        else:
            descriptor = Descriptor(os.memfd_create("rlhf-value"))
            os.ftruncate(descriptor.number, end)
            memory = mmap.mmap(descriptor.number, end)
        for start, part in zip(starts, parts, strict=True):
            memory[start : start + part.nbytes] = part
        content = bytes(memory) if descriptor is None else descriptor
        return cls(sizes, content, pickler.descriptors)

    def value(self) -> Any:
        *starts, end = accumulate(map(_padded, self.sizes), initial=0)
        if isinstance(self.content, bytes):
            memory = memoryview(self.content)
        else:
            memory = memoryview(mmap.mmap(self.content.number, end, access=mmap.ACCESS_READ))
        stream, *buffers = [memory[start : start + size] for start, size in zip(starts, self.sizes, strict=True)]
        return _SharedValueUnpickler(io.BytesIO(stream), self.children, buffers).load()

    @classmethod
    def fetch(cls, handles: Sequence[SharedValue]) -> list[Any]:
        return [handle.value() for handle in handles]


class _SharedValuePickler(cloudpickle.CloudPickler):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.descriptors: list[Descriptor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Descriptor):
            return None
        self.descriptors.append(obj)
        return len(self.descriptors) - 1


class _SharedValueUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, children: Sequence[Descriptor], buffers: Sequence[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._children = children

    def persistent_load(self, index: Any) -> Descriptor:
        return self._children[index]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
