"""Options that a checkpoint's release did not have, or its plugins: at their defaults they change no run.

A run that is resumed after an upgrade has keys that its checkpoint lacks. Nobody can set such a key back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from rlhf.errors import RlhfError

from rlhf_runtime.checkpoint import Difference
from rlhf_runtime.config.runfile import RunFile


def allow_defaults(
    differences: Sequence[Difference], config: RunFile, resolve: Callable[[RunFile], RunFile]
) -> list[Difference]:
    """``differences`` between a checkpoint and ``config``, in which options that the checkpoint lacks are ``added`` and
    no longer refused where ``config`` without them means the same.

    Args:
        config: the run file with every option filled in.
        resolve: fills in options (:func:`rlhf_runtime.config.components.resolved_run`).
    """
    stated = config.model_dump(mode="json")

    def at_default(key: str) -> bool:
        data = config.model_dump()
        if not _remove(data, key.split(".")):
            return False
        try:
            return resolve(RunFile.model_validate(data)).model_dump(mode="json") == stated
        except (ValidationError, RlhfError):  # it cannot be left out
            return False

    return [
        replace(d, severity="added") if d.severity == "refuse" and d.absent_before and at_default(d.key) else d
        for d in differences
    ]


def _remove(data: Any, path: list[str]) -> bool:
    """Take the value at ``path`` out; False where there is none."""
    *above, last = path
    for part in above:
        if isinstance(data, list | tuple):
            data = dict(zip(map(str, range(len(data))), data, strict=True)).get(part)
        elif isinstance(data, dict):
            data = data.get(part)
    if not isinstance(data, dict) or last not in data:
        return False
    del data[last]
    return True
