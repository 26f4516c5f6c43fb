"""Paths that users write: one that the system cannot look up is refused where it is read, not where it is used."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

_BELOW = "checkpoints/.saving-step-000000/roles/reference/optimizer.safetensors"
"""About the longest path that a run makes below its folder: there must be room for it."""
_NAME_BYTES = 255
"""Of a file or folder, on Linux whatever the file system."""


def check_path(text: str) -> str:
    """``text``, whether or not anything is there.

    Raises ValueError where the system cannot even look: the path or one of its names is too long, holds a null
    character, names an unknown user (``~name``), or lies in a folder that may not be read.
    """
    try:
        path = Path(text).expanduser().absolute() / _BELOW
        if any(
            len(os.fsencode(name)) > _NAME_BYTES for name in path.parts
        ):  # also below a folder that is yet to be made
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return text
    except (OSError, ValueError, RuntimeError) as cause:
        shown = repr(text) if len(text) <= 60 else f"{text[:57]!r}... ({len(text)} characters)"
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause).rstrip(".")
        raise ValueError(f"the path {shown} cannot be used: {why}. Give another path.") from None
    return text


def path_argument(text: str) -> Path:
    """For ``add_argument(type=path_argument)``: a path that the system can look up; any other is a wrong usage."""
    try:
        return Path(check_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


PathText = Annotated[str, AfterValidator(check_path)]
"""A field that holds a path, or what may be one: a hub name is looked for as a path first."""
