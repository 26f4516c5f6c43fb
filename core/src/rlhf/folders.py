"""Checks of the folders that observers write to."""

from __future__ import annotations

from pathlib import Path

from rlhf.errors import ConfigError
from rlhf.paths import check_path


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
            raise ConfigError(f"{option}: {folder} cannot be a folder, as {place} is a file. Name another.")
