"""Judgements by content: in memory, and in a folder."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

IN_MEMORY = 100_000
"""Judgements kept in memory; the oldest is dropped first."""


def key_of(request: dict[str, Any]) -> str:
    """The hash of everything that decides a judgement."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


class Cache:
    """A folder holds one small file per judgement, ``{"verdict": {...}}``, named by its key: no prompt and no token.
    Several runs may use it at once.

    Raises ConfigError where the folder cannot be made.
    """

    def __init__(self, folder: str | None) -> None:
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._folder = None if folder is None else Path(folder).expanduser()
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"reward 'judge': cache = {folder!r} cannot be made: {error}") from None

    def get(self, key: str) -> Any:
        """A judgement; None if it is not there, or its file is damaged."""
        if key in self._kept:
            return self._kept[key]
        if self._folder is None:
            return None
        try:
            return json.loads((self._folder / f"{key}.json").read_text(encoding="utf-8"))["verdict"]
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def put(self, key: str, verdict: dict[str, Any]) -> None:
        self._kept[key] = verdict
        while len(self._kept) > IN_MEMORY:
            self._kept.popitem(last=False)
        if self._folder is None:
            return
        with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False, encoding="utf-8") as file:
            json.dump({"verdict": verdict}, file)
        os.replace(file.name, self._folder / f"{key}.json")  # readers see all of it or nothing
