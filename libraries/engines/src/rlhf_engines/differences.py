"""The generator's copy of the weights that servers received last. With it, a sync sends only the changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from rlhf.weights.bucket import Bucket
from rlhf.weights.fingerprint import marks
from torch import Tensor

from rlhf_engines.weight_files import write_bucket


class SentWeights:
    """A copy of the weights in host memory, rounded to the servers' format as vLLM would round them.

    The proof is based on the trainer's fingerprints. They must equal those of the buckets that arrive here, and each
    worker must report the fingerprint of the whole rounded tensor.

    Args:
        formats: formats of the servers' parameters. If one of them is float32, nothing is rounded here.
    """

    def __init__(self, formats: set[str]) -> None:
        self.dtype = torch.bfloat16 if formats == {"bfloat16"} else torch.float32
        self.tensors: dict[str, Tensor] = {}
        self.nbytes = 0
        """Number of bytes of the files of this load."""
        self._load, self._version, self._faithful = "", -1, True
        self._marks: dict[str, tuple[str, str]] = {}
        """{name: (fingerprint of the tensor that arrived here, fingerprint of the rounded tensor)}."""

    def begin(self, version: int) -> str:
        """Start a load of ``version``. If only differences are to be sent, returns the name of the load whose weights
        the servers must hold. Empty: everything is sent. This is the case at first, after a failed load, and if a
        version is sent again because its proof failed or an engine lost it."""
        is_repeated, self._version = version == self._version, version
        load, self._load = self._load, ""
        self.nbytes, self._faithful = 0, True
        self._marks.clear()
        return "" if is_repeated else load

    def write(self, bucket: Bucket, path: Path) -> None:
        arrived = bucket.received()
        tensors = {name: self._rounded(tensor) for name, tensor in bucket.tensors}
        prints = marks(list(tensors.values()))
        self._marks |= {name: (arrived[name], mark) for name, mark in zip(tensors, prints, strict=True)}
        write_bucket(Bucket(tuple(tensors.items()), tuple(prints)), path, self.tensors)
        self.nbytes += path.stat().st_size
        self.tensors |= tensors

    def _rounded(self, tensor: Tensor) -> Tensor:
        narrower = tensor.is_floating_point() and tensor.element_size() > self.dtype.itemsize
        return tensor.detach().to("cpu", self.dtype if narrower else tensor.dtype, copy=True).contiguous()

    def proof(self, received: Mapping[str, str]) -> dict[str, str]:
        """Convert a worker's fingerprints to the trainer's: for each tensor that arrived completely at the worker, the
        fingerprint of the tensor that arrived here."""
        self._faithful &= received == {name: mark for name, (_, mark) in self._marks.items()}
        pairs = {name: self._marks.get(name, ("", "")) for name in received}
        return {name: pairs[name][0] if mark == pairs[name][1] else mark for name, mark in received.items()}

    def end(self, load: str) -> None:
        """End a load. ``load`` names the weights that every worker now holds, if the proofs confirm it."""
        self._load = load if self._faithful else ""
