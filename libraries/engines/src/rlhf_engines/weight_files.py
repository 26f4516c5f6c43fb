"""Buckets of weights as files, written by a generator and read by the workers of servers.

A file contains whole tensors. Of tensors that the reader already holds, it contains only the elements that changed, bit
by bit. Their positions are stored as gaps: the number of unchanged elements before each. A gap that is too large for
its integer type is split into shorter ones, with unchanged elements between them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from rlhf.errors import ConfigError, SyncError
from rlhf.weights.bucket import Bucket
from rlhf.weights.fingerprint import host_bytes
from torch import Tensor

PROTOCOL = 3
"""Version of the protocol. It changes if an older generator and a newer worker, or the reverse, would misunderstand
each other."""
FINGERPRINTS = "fingerprints"
GAPS, VALUES = "gaps ", "values "
"""Prefixes of the entries of a tensor that is not whole. A tensor without entries did not change."""

FOLDER = "rlhf-weights-"
"""Prefix of the folders for these files."""
_NEW_SECONDS = 60
"""A younger folder may not be locked yet."""


class WeightsFolder:
    """A new folder for files of weights. It is locked while this process lives and removed at its end. Folders that
    killed processes left in this machine's temporary folder are removed first.

    Args:
        place: the parent folder; None: the temporary folder.

    Raises ConfigError if nothing can be written there.
    """

    def __init__(self, place: str | None) -> None:
        if place is None:  # machines that share a file system may not see each other's locks
            _remove_left(Path(tempfile.gettempdir()))
        try:
            self.path = Path(tempfile.mkdtemp(prefix=FOLDER, dir=place))
        except OSError as error:
            raise ConfigError(
                f"files of weights cannot be written to {place or tempfile.gettempdir()}: {error.strerror}. Make it "
                "writable, or name another folder (generator.folder)."
            ) from error
        lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.remove = weakref.finalize(self, _remove, os.getpid(), self.path, lock)
        """A second call does nothing."""


def _remove(process: int, folder: Path, lock: int) -> None:
    if os.getpid() == process:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_left(place: Path) -> None:
    for folder in place.glob(f"{FOLDER}*"):
        with suppress(OSError):  # its process is alive, or it belongs to another user
            # every user may write to a temporary folder: a pipe of this name would be waited for
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if time.time() - os.fstat(lock).st_mtime > _NEW_SECONDS:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def digest(path: Path) -> str:
    """A digest of a file. It shows the writer which file a reader sees, but nothing about other files."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_bucket(bucket: Bucket, path: Path, base: Mapping[str, Tensor] | None = None) -> None:
    """Write the bucket as a file of safetensors. Its metadata contain the order and the fingerprints.

    Args:
        base: {name: tensor} in host memory, the tensors that every reader holds.

    Raises SyncError if the file cannot be written, for example because the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    names = dict(zip((name for name, _ in bucket.tensors), bucket.fingerprints, strict=True))
    entries: dict[str, Tensor] = {}
    for name, tensor in bucket.tensors:
        changes = _changes(tensor, base[name]) if base and name in base else None
        if changes is None:
            # clone(), because safetensors refuses to save tensors that share memory.
            entries[name] = tensor.detach().cpu().contiguous().clone()
        elif len(changes[0]):
            entries[GAPS + name], entries[VALUES + name] = changes
    try:
        save_file(entries, path, {FINGERPRINTS: json.dumps(names)})
    except (OSError, SafetensorError) as error:
        raise SyncError(
            f"{bucket.nbytes / 2**20:.0f} MiB of weights cannot be written to {path.parent}: {error}. Free space there "
            "for one bucket (sync.bucket_mb), or name another folder (generator.folder)."
        ) from error


def read_bucket(path: Path, base: dict[str, Tensor] | None = None) -> Bucket:
    """The bucket of :func:`write_bucket`.

    Args:
        base: {name: tensor} that this reader holds. They are updated to the bucket's values, and the bucket shares
            their memory. None: the reader holds none, and the bucket's tensors map the file.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        names, entries = json.loads(file.metadata()[FINGERPRINTS]), set(file.keys())
        if base is None:
            return Bucket(tuple((name, file.get_tensor(name)) for name in names), tuple(names.values()))
        for name in names:
            if name in entries:
                base[name] = file.get_tensor(name).clone()
            elif GAPS + name in entries:
                positions_E = (file.get_tensor(GAPS + name).long() + 1).cumsum(0) - 1
                base[name].view(-1)[positions_E] = file.get_tensor(VALUES + name)
    return Bucket(tuple((name, base[name]) for name in names), tuple(names.values()))


def _changes(tensor: Tensor, old: Tensor) -> tuple[Tensor, Tensor] | None:
    """(gaps, values) of the elements of ``tensor`` that differ from ``old``. None if ``tensor`` itself is smaller."""
    if (tensor.shape, tensor.dtype) != (old.shape, old.dtype):
        return None
    size = tensor.element_size()
    new_words, old_words = (host_bytes(t).view(f"u{size}") for t in (tensor, old))
    gaps_P = np.diff(np.flatnonzero(new_words != old_words), prepend=-1) - 1

    def nbytes(width: int) -> int:
        return int((gaps_P // 256**width + 1).sum()) * (width + size)

    width = min((1, 2), key=nbytes)
    if nbytes(width) >= tensor.nbytes:
        return None
    spans_P, rest_P = np.divmod(gaps_P, 256**width)
    gaps_E = np.full((spans_P + 1).sum(), 256**width - 1, f"u{width}")
    gaps_E[(spans_P + 1).cumsum() - 1] = rest_P
    positions_E = (gaps_E.astype(np.int64) + 1).cumsum() - 1
    return torch.from_numpy(gaps_E), tensor.detach().cpu().reshape(-1)[torch.from_numpy(positions_E)]
