"""What servers got last, kept by the generator so that a sync sends only what changed since."""

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

    The proof goes on from the trainer's fingerprints: they must be those of the buckets that arrive here, and each
    worker must report the fingerprint of the whole rounded tensor.

    Args:
        formats: of the servers' parameters. Where one keeps them in float32, nothing is rounded here.
    """

    def __init__(self, formats: set[str]) -> None:
        self.dtype = torch.bfloat16 if formats == {"bfloat16"} else torch.float32
        self.tensors: dict[str, Tensor] = {}
        self.nbytes = 0
        """Of the files of this load."""
        self._load, self._version, self._faithful = "", -1, True
        self._marks: dict[str, tuple[str, str]] = {}
        """{name: (fingerprint of the tensor that arrived here, of the rounded one)}."""

    def begin(self, version: int) -> str:
        """Weights of ``version`` follow. Returns the name of the load whose weights the servers must hold, if only
        differences are to be sent; empty: all is sent, at first, after a load that failed, and if a version is sent
        again, because its proof failed or an engine lost it."""
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
        """A worker's fingerprints in terms of the trainer's: of each tensor that arrived whole at the worker, the
        fingerprint of what arrived here."""
        self._faithful &= received == {name: mark for name, (_, mark) in self._marks.items()}
        pairs = {name: self._marks.get(name, ("", "")) for name in received}
        return {name: pairs[name][0] if mark == pairs[name][1] else mark for name, mark in received.items()}

    def end(self, load: str) -> None:
        """``load`` names the weights that every worker holds now, if the proofs say so."""
        self._load = load if self._faithful else ""
