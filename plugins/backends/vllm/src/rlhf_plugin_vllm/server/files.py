"""Buckets of weights as files, which a generator writes and the workers of servers read."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf.weights.bucket import Bucket

PROTOCOL = 1
"""Changes when an older generator and a newer worker, or the reverse, would misunderstand each other."""
FINGERPRINTS = "fingerprints"


def write_bucket(bucket: Bucket, path: Path) -> None:
    """Write the bucket as a file of safetensors. Its metadata hold the order and the fingerprints."""
    from safetensors.torch import save_file

    marks = dict(zip((name for name, _ in bucket.tensors), bucket.fingerprints, strict=True))
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in bucket.tensors}
    save_file(tensors, path, {FINGERPRINTS: json.dumps(marks)})


def read_bucket(path: Path) -> Bucket:
    """The bucket of :func:`write_bucket`. Its tensors map the file."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        marks = json.loads(file.metadata()[FINGERPRINTS])
        return Bucket(tuple((name, file.get_tensor(name)) for name in marks), tuple(marks.values()))
