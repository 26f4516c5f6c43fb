"""Converts values that foreign files return to plain numbers and texts. Tensors are recognised by their methods,
without importing torch."""

from __future__ import annotations

import io
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import brief
from rlhf.types import Row


def scalar(value: Any, label: str) -> float | None:
    """One number: a tensor or list with one element, or the number itself; None stays None. Raises TypeError for other
    values."""
    if value is None:
        return None
    if isinstance(value, list | tuple):
        if len(value) == 1:
            return scalar(value[0], label)
    elif isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            raise TypeError(f"{label} is {brief(value)}; expected a number that a float can hold") from None
    elif hasattr(value, "item") and getattr(value, "size", None) is not None and _elements(value) == 1:
        return float(value.item())
    raise TypeError(f"{label} is {value!r}; expected one number: a float, or a tensor or list with one element")


def scalars(values: Any, label: str, count: int) -> list[float | None]:
    """One number for each of ``count`` samples, from a list or a tensor. None: no sample has a number. For a single
    sample, ``values`` may be the number itself. Raises TypeError for other values."""
    if values is None:
        return [None] * count
    if count == 1:
        return [scalar(values, label)]
    numbers = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(numbers, list | tuple) or len(numbers) != count:
        raise TypeError(
            f"{label} is {brief(values)}; expected {count} numbers, one for each sample of the batch. A function that "
            'scores one sample per call needs batch = "sample" in its section.'
        )
    return [scalar(number, f"{label}[{n}]") for n, number in enumerate(numbers)]


def batch_logs(values: Any, count: int) -> list[dict[str, Any]]:
    """``extra_logs`` for each of ``count`` samples. A text, and a single number such as a mean, is of every sample."""
    infos: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in _mapping(values, "extra_logs").items():
        label = f"extra_logs[{name!r}]"
        numbers = [value] * count if isinstance(value, str) else _one_or_each(value, label, count)
        for info, number in zip(infos, numbers, strict=True):
            info[str(name)] = number
    return infos


def _one_or_each(value: Any, label: str, count: int) -> list[float | None]:
    try:
        return [scalar(value, label)] * count
    except TypeError:
        if count == 1:
            raise
        return scalars(value, label, count)


def logs(values: Any, label: str) -> dict[str, Any]:
    """``extra_logs`` with plain numbers; text stays text."""
    values = _mapping(values, label)
    return {str(k): v if isinstance(v, str) else scalar(v, f"{label}[{k!r}]") for k, v in values.items()}


def _mapping(values: Any, label: str) -> Mapping[Any, Any]:
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"{label} is {values!r}; expected a dict")
    return values or {}


def label_of(row: Row, column: str | None) -> Any:
    """The row's label: the column configured, else ``label``, else ``answer``, else an empty text, as in OpenRLHF."""
    if column is None:
        return row.get("label", row.get("answer", ""))
    if column not in row.columns:
        raise KeyError(f"no column {column!r}; the row has {sorted(row.columns)}. Set `label`.")
    return row[column]


def image_bytes(value: Any) -> bytes:
    """The content of an image file for an item of ``environment_images``, which is a PIL image, bytes or a path."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and not value.startswith(("http://", "https://")):
        return Path(value).expanduser().read_bytes()
    if hasattr(value, "save") and hasattr(value, "convert"):
        file = io.BytesIO()
        value.convert("RGB").save(file, "PNG")
        return file.getvalue()
    raise TypeError(f"environment_images holds {brief(value)}; allowed: PIL images, bytes and paths of files")


def _elements(value: Any) -> int:
    return int(value.numel() if hasattr(value, "numel") else value.size)
