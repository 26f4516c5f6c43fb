"""The images of rows and messages as contents of image files.

An image is a path, a ``data:`` URL, the bytes of a file, ``{"bytes", "path"}`` as ``datasets`` stores images, or a PIL
image. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import binascii
import errno
import io
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import DataError, brief

ALLOWED = "a path, a data: URL, bytes, {bytes, path} or a PIL image"
FORMATS = ("PNG", "JPEG", "WEBP")
"""Formats of Pillow that are kept. Images in other formats are converted to PNG, because programs get them as ``data:``
URLs."""
_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_ORIENTATION = 274
"""EXIF tag for the rotation of the image. 1: not rotated."""
_WIDE = ("I", "F")
"""Prefixes of the Pillow modes with more than 8 bits per pixel and colour. Their range is not known, and Pillow would
clip values above 255."""


def image_file(value: Any, folder: Path | None) -> bytes:
    """The content of an image file, in RGB and upright, so that trainers and engines read the same pixels from it.

    The bytes of an RGB image are kept. Other images (grey, with a palette, rotated by an EXIF tag, the first of several
    frames) are converted to PNG. Transparency is dropped, as processors do.

    Args:
        folder: relative paths start here; None: paths are refused.

    Raises DataError: the value is not an image of an allowed form, the file does not exist or cannot be decoded, a
    colour has more than 8 bits, or the image has more than 179 million pixels, which PIL treats as an attack.
    """
    from PIL import Image, ImageOps

    data, image = b"", value
    try:
        if not is_picture(value):
            data = _content(value, folder)
            image = Image.open(io.BytesIO(data))
            if image.format == "EPS":  # Pillow would run it by Ghostscript
                raise DataError(f"{_image_label(value)} is a program (EPS), which is not run; convert it to PNG")
        elif not isinstance(value, Image.Image):
            image = Image.fromarray(value)
        # Pillow decodes a file only here, so an error in its pixels is found here too.
        image.load()
        upright = image.getexif().get(_ORIENTATION, 1) == 1
        if image.mode.startswith(_WIDE):
            raise DataError(f"{_image_label(value)} has the pixel mode {image.mode!r}; use 8 bits per channel")
        if data and image.mode == "RGB" and image.format in FORMATS and upright and getattr(image, "n_frames", 1) == 1:
            return data
        file = io.BytesIO()
        upright_image = image if upright else ImageOps.exif_transpose(image)
        # convert() keeps the transparent colour in `image.info`, and save() would write it.
        upright_image.convert("RGB").save(file, "PNG", transparency=None)
    except DataError:
        raise
    except Exception as error:  # of many classes: from PIL, from its decoders, or about too many pixels
        if shape := getattr(value, "shape", None):
            raise DataError(f"an array of shape {shape} is not an image: {error}") from None
        reason = re.sub(r" <_io.BytesIO object at \w+>", "", str(error))
        raise DataError(f"{_image_label(value)} cannot be read as an image: {type(error).__name__}: {reason}") from None
    return file.getvalue()


def is_picture(value: Any) -> bool:
    """Whether a value is a PIL image, or an array of at least two dimensions, such as pixels."""
    if getattr(value, "ndim", 0) >= 2 and hasattr(value, "__array_interface__"):
        return True
    library = sys.modules.get("PIL.Image")
    return library is not None and isinstance(value, library.Image)


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height of an image file, in pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.size


def thumbnail(data: bytes, size: int) -> bytes:
    """An image file as JPEG, not wider and not higher than ``size`` pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        small = image.convert("RGB")
    small.thumbnail((size, size))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return file.getvalue()


def data_url(data: bytes) -> str:
    """An image file as a ``data:`` URL."""
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg" if data.startswith(b"\xff\xd8") else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def may_be_image(value: Any) -> bool:
    """Whether a value looks like an image. A text in a column ``image`` may also name something else, such as a
    container."""
    if isinstance(value, str):
        return value.startswith(("data:", "http://", "https://")) or Path(value).suffix.lower() in _SUFFIXES
    return isinstance(value, bytes | Mapping) or hasattr(value, "tobytes")


def image_path(value: Any) -> str | None:
    """The path, if the image is a path; None for other forms."""
    if isinstance(value, Mapping) and value.get("bytes") is None:
        value = value.get("path")
    if not isinstance(value, str) or value.startswith(("data:", "http://", "https://")):
        return None
    return value.removeprefix("file://")


def _content(value: Any, folder: Path | None) -> bytes:
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        return value["bytes"]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str) and value.startswith(("http://", "https://")):
        raise DataError(
            f"{value[:80]!r} is a URL, and URLs are not downloaded: save the image beside the data and give its path"
        )
    if isinstance(value, str) and value.startswith("data:"):
        head, _, encoded = value.partition(",")
        try:
            if not head.endswith(";base64"):
                raise ValueError("it is not in base64")
            return base64.b64decode(encoded, validate=True)
        except (ValueError, binascii.Error) as error:
            raise DataError(f"the data: URL {value[:40]!r}... is damaged: {error}") from None
    path = image_path(value)
    if not path:
        raise DataError(f"an image must be {ALLOWED}, got {brief(value)}")
    if folder is None:
        raise DataError(
            f"{path[:80]!r} is a path, which only rows of local files may contain; give the image as bytes or a data: "
            f"URL"
        )
    file = folder / Path(path).expanduser()
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # reading a device or a pipe might never end
            raise DataError(f"the image {str(file)!r} is neither a file nor a link to one")
        return file.read_bytes()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise DataError(
                f"{path[:40]!r}... is too long for a path. If it is an image in base64, write it as a data: URL: "
                "data:image/png;base64,..."
            ) from None
        raise DataError(f"the image {str(file)!r} cannot be read: {error.strerror or error}") from None


def _image_label(value: Any) -> str:
    path = image_path(value) if isinstance(value, str | Mapping) else None
    return f"the image {path!r}" if path else "the image"
