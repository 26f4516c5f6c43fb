"""Keeps the inputs of checkpointed layers in host memory from forward to backward (``trainer.offload_activations``).

On a GPU a second stream copies them. It copies an input to pinned memory while its layer computes, and back while the
layer behind it is recomputed. So at most two inputs are on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Input:
    """One input; the graph holds it."""

    def __init__(self, host: Tensor, predecessor: ReferenceType[_Input] | None) -> None:
        self.host, self.predecessor = host, predecessor
        self.copy: Tensor | None = None
        """On the device, copied before it is used."""
        self.was_read = False


class HostInputs:
    """Moves the inputs of the layers of one model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.count = 0
        """Inputs that were moved to the host."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copies: list[tuple[torch.cuda.Event, Tensor]] = []
        self._last: ReferenceType[_Input] | None = None

    def around(self, checkpointed: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``checkpointed`` so that its input is moved. Values that the layer saves are recomputed in any case."""

        def offloaded(*args: Any, **options: Any) -> Any:
            with saved_tensors_hooks(self._pack, self._unpack):
                return checkpointed(*args, **options)

        return offloaded

    def _pack(self, x: Tensor) -> _Input | Tensor:
        if not x.is_floating_point():
            return x
        self._wait()
        host = torch.empty_like(x, device="cpu", pin_memory=self._stream is not None)
        self._copy(host, x.detach())
        packed = _Input(host, self._last)
        self._last, self.count = ref(packed), self.count + 1
        return packed

    def _unpack(self, packed: _Input | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.copy is None:
            self._fetch(packed)
        self._wait()
        x, packed.copy, packed.was_read = packed.copy, None, True
        predecessor = packed.predecessor() if packed.predecessor is not None else None
        if predecessor is not None and not predecessor.was_read:
            self._fetch(predecessor)
        assert x is not None
        return x

    def _fetch(self, packed: _Input) -> None:
        packed.copy = torch.empty_like(packed.host, device=self.device)
        self._copy(packed.copy, packed.host)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied = self._stream.record_event()
        self._copies.append((copied, source if source.is_cuda else target))

    def _wait(self) -> None:
        """Make later work wait for all copies. Only then may the device memory be reused, which belongs to the stream
        of that work."""
        for copied, _ in self._copies:
            torch.cuda.current_stream(self.device).wait_event(copied)
        self._copies.clear()
