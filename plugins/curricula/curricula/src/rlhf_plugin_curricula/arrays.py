"""Arrays as text for checkpoints: one value per row of the data, written with little work after every step."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_text(array: NDArray[Any]) -> str:
    """The bytes of an array in base64; numbers are little-endian."""
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def from_text(text: str, like: NDArray[Any]) -> NDArray[Any]:
    """The inverse of :func:`to_text`. The array has the type and length of ``like``. Raises ValueError for another
    length."""
    stored = np.frombuffer(base64.b64decode(text, validate=True), like.dtype.newbyteorder("<"))
    if len(stored) != len(like):
        raise ValueError(f"{len(stored)} values were saved, but the data has {len(like)} rows")
    return stored.astype(like.dtype)
