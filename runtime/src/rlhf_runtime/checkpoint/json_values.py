"""JSON that is read back exactly as it was written: floats are bit-equal, and no value is converted.

Python writes floats with ``repr`` (the shortest text that reads back to the same double), so numbers are exact. Values
that plain ``json`` would change silently are refused: keys that are not text, NaN and infinity (which other JSON
readers refuse) and objects. One change remains: tuples are read back as lists.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal, NoReturn

from rlhf.errors import CheckpointError

from rlhf_runtime.checkpoint.atomic_files import write_atomic

MARK = "$float"
"""``{"$float": "nan"}`` represents a number that JSON cannot represent."""

Nonfinite = Literal["refuse", "mark"]


def encode(value: Any, name: str = "state", nonfinite: Nonfinite = "refuse") -> Any:
    """``value`` as plain JSON values. Scalars of numpy and torch become the Python number they hold.

    Args:
        name: name of the value in messages: ``state.algorithm.kl_coef``.
        nonfinite: ``refuse`` NaN and infinity, or ``mark`` them as ``{"$float": "nan"}``.

    Raises CheckpointError naming the place of a value that JSON cannot represent.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if nonfinite == "mark":
            return {MARK: repr(float(value))}
        raise CheckpointError(
            f"{name} is {value!r}, which JSON cannot hold. Keep None for 'no value yet', or write it with "
            f'nonfinite="mark".'
        )
    if isinstance(value, list | tuple):
        return [encode(item, f"{name}[{n}]", nonfinite) for n, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == MARK:
                raise CheckpointError(
                    f"{name} has the key {key!r}; keys must be text other than {MARK!r}. Store str(key) and convert it "
                    "when it is read, or store a list of [key, value] pairs."
                )
        return {key: encode(item, f"{name}.{key}", nonfinite) for key, item in value.items()}
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which JSON cannot hold. Allowed: dict with text keys, list, str, "
        f"int, float, bool, None."
    )


def dumps(value: Any, name: str = "state", nonfinite: Nonfinite = "refuse", indent: int | None = None) -> str:
    """``value`` as JSON text; see :func:`encode`."""
    return to_text(encode(value, name, nonfinite), indent)


def to_text(plain: Any, indent: int | None = None) -> str:
    """Plain JSON values as text that can be encoded as UTF-8. Lone surrogates (which models do produce) are escaped;
    other characters are not. Raises ValueError for NaN and infinity, TypeError for objects."""
    text = json.dumps(plain, allow_nan=False, ensure_ascii=False, indent=indent)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(plain, allow_nan=False, indent=indent)
    return text


def loads(text: str, name: str = "state", way_out: str = "") -> Any:
    """The value from which :func:`dumps` made ``text``. Raises CheckpointError for text that is not strict JSON."""
    try:
        return json.loads(text, object_hook=unmark, parse_constant=_refuse_constant)
    except (ValueError, TypeError, RecursionError) as cause:  # also a marker without a number, or too many brackets
        raise CheckpointError(f"{name} is not valid JSON: {cause}{way_out and f'. {way_out}'}") from cause


def write_json(path: Path, value: Any, nonfinite: Nonfinite = "refuse") -> None:
    """Write ``value`` to ``path``. After a crash, ``path`` is the complete new file or the old one."""
    write_atomic(path, dumps(value, path.name, nonfinite, indent=1) + "\n")


def read_json(path: Path, way_out: str = "") -> Any:
    """Read a file of :func:`write_json`. Raises CheckpointError for a missing or damaged file.

    Args:
        way_out: the end of the message, which says what to do if the file is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise CheckpointError(f"cannot read {path}: {cause}") from cause
    return loads(text, str(path), way_out)


def unmark(value: dict[str, Any]) -> Any:
    """The number that :func:`encode` marked; any other dict unchanged."""
    return float(value[MARK]) if value.keys() == {MARK} else value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"the constant {text} is not JSON")
