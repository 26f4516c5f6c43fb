"""Loads new weights into a running model of SGLang. A load is complete or refused.

SGLang's ``load_weights`` copies each tensor into a part of a parameter. It ignores names that the model does not have,
and does not detect parameters without a tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from rlhf.errors import SyncError, short_list
from rlhf.weights.bucket import Bucket
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class CopiedTensors(TorchDispatchMode):
    """Context that records which of a bucket's tensors are copied in this thread, completely or in parts.

    Args:
        write: whether they are written. False: each copy is only compared with the existing values.
    """

    def __init__(self, bucket: Bucket, write: bool) -> None:
        super().__init__()
        self.write = write
        self.names: set[str] = set()
        self.differing: set[str] = set()
        places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in bucket.tensors)
        self._starts = [start for start, _, _ in places]
        self._places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and (name := self._name(args[1])):
            self.names.add(name)
            if not self.write:
                if not torch.equal(args[0], args[1].to(args[0])):
                    self.differing.add(name)
                return args[0]
        return func(*args, **(kwargs or {}))

    def _name(self, source: Tensor) -> str:
        n = bisect_right(self._starts, source.data_ptr()) - 1
        return self._places[n][2] if n >= 0 and source.data_ptr() < self._places[n][1] else ""


class ModelLoad:
    """One load of all weights: buckets by :meth:`take`, then :meth:`end`. Until the end the model must not be sampled
    from, because elements that have not arrived are NaN."""

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model  # SGLang's, with its own load_weights
        self.received: dict[str, str] = {}
        """{name as the trainer sent it: fingerprint of the received bytes}."""
        self.nbytes = 0
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(torch.nan)

    @torch.no_grad()
    def take(self, bucket: Bucket) -> None:
        """Load a bucket's tensors. Raises SyncError for a tensor that the model does not have, or of another shape."""
        names = [name for name, _ in bucket.tensors]
        try:
            with CopiedTensors(bucket, write=True) as copied:
                self.model.load_weights(iter(bucket.tensors))
        except Exception as error:
            raise SyncError(
                f"SGLang cannot load one of the received tensors {short_list(names, 8)} ({type(error).__name__}: "
                f"{error}). The generator's model is not the policy's."
            ) from error
        if ignored := [name for name in names if name not in copied.names]:
            raise SyncError(
                f"SGLang's {type(self.model).__name__} does not take the tensors {short_list(ignored, 8)}. The "
                "generator's model is not the policy's."
            )
        self.received |= bucket.received()
        self.nbytes += bucket.nbytes

    def end(self) -> list[str]:
        """SGLang's names of parameters with elements that did not arrive, or are NaN. If there are any, the model must
        not be sampled from."""
        return [
            f"a part of {name}"
            for name, parameter in self.model.named_parameters()
            if parameter.is_floating_point() and bool(parameter.isnan().any())
        ]


@torch.no_grad()
def differing(model: Any, bucket: Bucket) -> list[str]:
    """Names of the bucket's tensors whose values differ from the model's. The model is not changed."""
    with CopiedTensors(bucket, write=False) as copied:
        model.load_weights(iter(bucket.tensors))
    return sorted(copied.differing)
