"""Values in the memory of a launcher's store, which its processes read without a copy by the driver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Stored(ABC):
    """A handle of one value. It can be an argument of a call; the worker gets the value in its place."""

    @classmethod
    @abstractmethod
    def fetch(cls, handles: Sequence[Any]) -> list[Any]:
        """The values of some handles of this class. Their memory is read-only."""
