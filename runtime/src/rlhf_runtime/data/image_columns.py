"""Images of a source: the folder where their paths start, and their part in the source's fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from rlhf_runtime.data.image_files import image_path
from rlhf_runtime.data.image_parts import image_of, is_image
from rlhf_runtime.data.sources import Source

FIELDS = ("images", "messages", "prompt", "chosen", "rejected", "response")
"""Fields of rows that may name images."""


def image_folder(source: Source) -> Path | None:
    """The folder of a source's file; None for a name on the hub, whose rows hold their images."""
    path = Path(source.section.path).expanduser()
    if not path.exists():
        return None
    return path if path.is_dir() else path.parent


def has_images(source: Source) -> bool:
    """Whether the source has a column of images, or the messages of any row have one. Without such a column every row
    is read."""
    columns = source.layout.columns if source.layout is not None else {}
    if "images" in columns:
        return True
    values = (value for field in FIELDS if field in columns for value in source.values(columns[field]))
    return any(True for value in values for _ in _image_parts(value))


def with_image_files(source: Source, columns: Mapping[str, str]) -> str:
    """The fingerprint of a source with the bytes of the image files that its rows name.

    Args:
        columns: {field: column} of its layout.
    """
    folder = image_folder(source)
    if folder is None:
        return source.fingerprint
    known: dict[str, str] = {}
    digest = hashlib.sha256(source.fingerprint.encode())
    for field in FIELDS:
        for value in source.values(columns[field]) if field in columns else ():
            for path in _paths(value, field == "images"):
                if path not in known:
                    known[path] = _content_hash(folder / Path(path).expanduser())
                digest.update(known[path].encode())
    return digest.hexdigest() if known else source.fingerprint


def _content_hash(file: Path) -> str:
    """A hash of a file's bytes; empty if it cannot be read, which is reported when the row is used."""
    try:
        with file.open("rb") as content:
            return xxhash.xxh3_128(content.read()).hexdigest()
    except (OSError, ValueError):
        return ""


def _paths(value: Any, images: bool) -> Iterator[str]:
    """The paths of images in a value of a column."""
    if images:
        for one in value if isinstance(value, list) else [value]:
            if path := image_path(one):
                yield path
    else:
        yield from filter(None, (image_path(image_of(part)) for part in _image_parts(value)))


def _image_parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """The images among the parts of messages, or of one message; none of other values."""
    for message in value if isinstance(value, list) else [value]:
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from (part for part in content if is_image(part)) if isinstance(content, list) else ()
