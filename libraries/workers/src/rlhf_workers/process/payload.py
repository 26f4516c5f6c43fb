"""Arguments and results between processes: one object in the store, with tensors as plain bytes.

pickle would send the whole storage behind a tensor view. Here only the tensor's own bytes are sent, out of band, and
unpacked into new memory. torch is imported only for tensors, so a worker without tensors starts quickly.
"""

from __future__ import annotations

import io
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from torch import Tensor


class Stored(ABC):
    """A handle of one value. It can be an argument of a call; the worker receives the value instead."""

    @classmethod
    @abstractmethod
    def fetch(cls, handles: Sequence[Any]) -> list[Any]:
        """The values of some handles of this class. Their memory is read-only."""


INLINE = 2**15
"""In bytes. A smaller payload travels inside the message to the worker. A larger one is put into the store, once."""
_HEADER = 64
"""Bytes of overhead per buffer, for :attr:`Payload.nbytes`."""

Pickled = tuple[bytes, list[Any], list[Any]]
"""(pickle stream, its out-of-band buffers, its handles of the store)."""


class Payload:
    """The arguments of one call for every rank. An object that all ranks receive is stored once."""

    def __init__(self, shared: Pickled, ranks: Sequence[Pickled]) -> None:
        self.shared, self.ranks = shared, list(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        def with_buffers(part: Pickled) -> Pickled:
            return part[0], [pickle.PickleBuffer(b) for b in part[1]], part[2]

        return Payload, (with_buffers(self.shared), [with_buffers(r) for r in self.ranks])

    @property
    def nbytes(self) -> int:
        """Approximate size in the store."""
        parts = (self.shared, *self.ranks)
        return sum(len(p[0]) + sum(memoryview(b).nbytes + _HEADER for b in p[1]) for p in parts)


def pack(per_rank: Sequence[tuple[Any, ...]]) -> Payload | None:
    """Pack ``per_rank[i]``, the arguments of rank i. None if there are no arguments."""
    if not any(per_rank):
        return None
    first, length = per_rank[0], len(per_rank[0])
    # By identity, not by value: comparing large arguments takes time, and == of tensors compares their elements.
    shared = [
        n for n in range(length) if len(per_rank) > 1 and all(len(a) > n and a[n] is first[n] for a in per_rank[1:])
    ]
    rank_values = [[value for n, value in enumerate(arguments) if n not in shared] for arguments in per_rank]
    return Payload(_dump({n: first[n] for n in shared}), [_dump(arguments) for arguments in rank_values])


def unpack(payload: Payload | None, rank: int = 0) -> tuple[Any, ...]:
    """The arguments of ``rank``, with tensors in new memory and handles of the store replaced by their values."""
    if payload is None:
        return ()
    shared: dict[int, Any] = _load(payload.shared)
    arguments: list[Any] = _load(payload.ranks[rank])
    # In ascending order, so that each position counts the arguments that were inserted before it.
    for position in sorted(shared):
        arguments.insert(position, shared[position])
    return tuple(arguments)


class _PayloadPickler(cloudpickle.CloudPickler):
    def __init__(self, file: Any, buffers: list[Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda b: buffers.append(b.raw()))
        self.refs: list[Stored] = []

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(obj) in (torch.Tensor, torch.nn.Parameter) and obj.layout is torch.strided:
            # As bytes, because numpy has no bfloat16.
            flat = obj.detach().cpu().contiguous().reshape(-1)
            buffer = pickle.PickleBuffer(flat.view(torch.uint8).numpy())
            return _tensor, (buffer, str(obj.dtype).removeprefix("torch."), tuple(obj.shape))
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, Stored):
            self.refs.append(obj)
            return len(self.refs) - 1
        return None


class _PayloadUnpickler(pickle.Unpickler):
    def __init__(self, part: Pickled) -> None:
        # copies, because the store's memory is shared and read-only: a write would kill this process
        super().__init__(io.BytesIO(part[0]), buffers=[bytearray(b) for b in part[1]])
        self.values = type(part[2][0]).fetch(part[2]) if part[2] else []

    def persistent_load(self, index: Any) -> Any:
        return self.values[index]


def _dump(value: Any) -> Pickled:
    file, buffers = io.BytesIO(), []  # type: ignore[var-annotated]
    pickler = _PayloadPickler(file, buffers)
    pickler.dump(value)
    return file.getvalue(), buffers, pickler.refs


def _load(part: Pickled) -> Any:
    return _PayloadUnpickler(part).load()


def _tensor(data: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer(data, dtype=kind).reshape(shape) if len(data) else torch.empty(shape, dtype=kind)
