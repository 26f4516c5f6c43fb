"""A stand-in for a GPU on the CPU. It counts where the host would wait for the device.

Its tensors are ordinary tensors of the CPU whose memory is remembered. They say that they are on ``cuda``, so the code
takes its way for GPUs. Whether a kernel of CUDA itself waits, only a GPU shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "repeat_interleave", "equal", "bincount")
"""Operators whose result the host reads, or whose size depends on values."""
READS = (Tensor.tolist, Tensor.numpy, Tensor.cpu)


@contextmanager
def gpu_stand_in(module: nn.Module) -> Iterator[Counter[str]]:
    """Inside, the weights of ``module`` are on the device. Yields {operation: how often the host waited for it}."""
    memory = _Memory()
    for tensor in (*module.parameters(), *module.buffers()):
        memory.add(tensor)
    pin_memory, Tensor.pin_memory = Tensor.pin_memory, _pinned  # which vLLM's CPU build replaces for a whole process
    try:
        with _Functions(memory), _Operators(memory):
            yield memory.waits
    finally:
        Tensor.pin_memory = pin_memory


def _pinned(x: Tensor) -> Tensor:
    x.is_pinned_here = True
    return x


class _Memory:
    storages: ClassVar[dict[int, StorageWeakRef]] = {}
    """Of all stand-ins: code keeps constants on the device."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()

    def add(self, x: Tensor) -> Tensor:
        reference = StorageWeakRef(x.untyped_storage())
        self.storages[reference.cdata] = reference  # a weak reference keeps the number from being used again
        return x

    def holds(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage()._cdata in self.storages

    def host_copy(self, x: Tensor) -> Tensor:
        out = x.detach().clone()
        self.storages.pop(out.untyped_storage()._cdata, None)
        return out


class _Functions(TorchFunctionMode):
    """Devices of tensors, and copies to and from the device."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, memory = kwargs or {}, self.memory
        on_device = bool(args) and memory.holds(args[0])
        if func == Tensor.device.__get__:
            return CUDA if on_device else CPU
        if func == Tensor.is_cuda.__get__:
            return on_device
        if on_device and func in READS:
            memory.waits[func.__name__] += 1
            return func(memory.host_copy(args[0]), *args[1:], **kwargs)
        devices = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
        if not devices or func is torch.device:
            return func(*args, **kwargs)
        to_device = devices[0].type == "cuda"
        args = tuple(CPU if isinstance(x, torch.device) else x for x in args)
        out = func(*args, **{name: CPU if isinstance(x, torch.device) else x for name, x in kwargs.items()})
        if func is Tensor.to and on_device != to_device:
            without_wait = to_device and kwargs.get("non_blocking") and hasattr(args[0], "is_pinned_here")
            memory.waits["copy to the device" if to_device else "copy to the host"] += not without_wait
            out = memory.host_copy(out)
        memory.waits["copy to the device"] += func is torch.tensor and to_device
        return memory.add(out) if to_device else out


class _Operators(TorchDispatchMode):
    """What is computed from tensors on the device is there too."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, memory = func(*args, **(kwargs or {})), self.memory
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(memory.holds(x) for x in tensors):
            return out
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(x.dtype == torch.bool for x in tensors[1:])
        memory.waits[f"{name} by a mask" if by_mask else name] += by_mask or name in WAITS
        memory.waits[f"{name} of tensors on both"] += any(x.ndim and not memory.holds(x) for x in tensors)
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                memory.add(x)
        return out
