"""Paths that users write. A path that the system cannot look up is refused when it is read, not when it is used."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path

from rlhf.errors import ConfigError

_LONGEST_PATH = "checkpoints/.saving-step-000000/roles/reference/optimizer.safetensors"
"""About the length of the longest path that a run makes below its folder. A path must leave room for it."""
_NAME_BYTES = 255
"""Longest name of a file or folder, in bytes, on all file systems of Linux."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_path(text: str) -> str:
    """Returns ``text``, whether or not the path exists.

    Raises ValueError if the system cannot look the path up: the path or one of its names is too long, contains a null
    character, names an unknown user (``~name``), or is in a folder that may not be read.
    """
    try:
        path = Path(text).expanduser().absolute() / _LONGEST_PATH
        if any(
            len(os.fsencode(name)) > _NAME_BYTES for name in path.parts
        ):  # also below a folder that does not exist yet
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return text
    except (OSError, ValueError, RuntimeError) as cause:
        label = repr(text) if len(text) <= 60 else f"{text[:57]!r}... ({len(text)} characters)"
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause).rstrip(".")
        raise ValueError(f"the path {label} cannot be used: {reason}. Give another path.") from None
    return text


def require_possible(folder: Path, option: str) -> None:
    """Raises ConfigError, naming the option, if ``folder`` cannot be created: it is a file, or a parent is a file, or
    the path is invalid. Creates nothing."""
    try:
        check_path(str(folder))
    except ValueError as cause:
        raise ConfigError(f"{option}: {cause}") from None
    for place in (folder, *folder.absolute().parents):
        if place.is_dir():
            return
        if place.exists():
            raise ConfigError(
                f"{option}: {folder} cannot be a folder, because {place} is a file. Choose another folder."
            )


def path_argument(text: str) -> Path:
    """For ``add_argument(type=path_argument)``: a path that the system can look up. Other paths are usage errors."""
    try:
        return Path(check_path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def disk_is_full(cause: BaseException) -> bool:
    """Whether ``cause`` means that no space is left. safetensors and torch raise their own errors for this."""
    if isinstance(cause, OSError) and cause.errno in _FULL:
        return True
    texts = [os.strerror(number) for number in _FULL]
    return any(text.lower() in str(cause).lower() for text in texts)
