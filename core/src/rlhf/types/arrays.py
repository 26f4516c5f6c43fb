"""Standard-library arrays: one block of memory for all tokens of a turn, which yields Python numbers.

torch and numpy read such an array without a copy (``torch.frombuffer``, ``numpy.frombuffer``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    IntArray = array[int]
    FloatArray = array[float]
else:  # array[int] is an error before Python 3.12
    IntArray = FloatArray = array


def int_array(values: Sequence[int], name: str) -> IntArray:
    """``values`` as ``array("i")``; such an array itself is returned, not a copy.

    Args:
        values: ints, or a buffer of int32 such as a numpy array.
        name: what they are, for messages.

    Raises:
        TypeError: not a sequence, or a value that is no int; a bool is none.
        ValueError: an int below -2**31 or above 2**31 - 1.
    """
    numbers = _of_buffer("i", values)
    if numbers is not None:
        return numbers
    values = _checked(values, (int,), name, "ints below 2**31")
    try:
        return array("i", values)
    except OverflowError:
        wrong = next(value for value in values if not -(2**31) <= value < 2**31)
        raise ValueError(f"{name} holds {wrong}; allowed: ints below 2**31") from None


def float_array(values: Sequence[float], name: str) -> FloatArray:
    """``values`` as ``array("f")``; such an array itself is returned, not a copy.

    Args:
        values: floats, which are rounded to float32, or a buffer of float32 such as a numpy array.
        name: what they are, for messages.

    Raises:
        TypeError: not a sequence, or a value that is no number; a bool is none.
    """
    numbers = _of_buffer("f", values)
    return array("f", _checked(values, (float, int), name, "floats")) if numbers is None else numbers


def _of_buffer(code: str, values: Any) -> array | None:
    """The array of a buffer of numbers of this type; None of anything else."""
    if isinstance(values, array) and values.typecode == code:
        return values
    try:
        view = memoryview(values)
    except TypeError:
        return None
    if view.format != code or view.ndim != 1:
        return None
    copy = array(code)
    copy.frombytes(view.tobytes())
    return copy


def _checked(values: Any, types: tuple[type, ...], name: str, allowed: str) -> list[Any]:
    if not isinstance(values, Sequence):
        hint = " (write .tolist())" if hasattr(values, "tolist") else ""
        raise TypeError(f"{name} is {values!r:.80}; allowed: a sequence of {allowed}{hint}")
    for value in values:
        # Not isinstance(): a bool is an int.
        if type(value) not in types:
            raise TypeError(f"{name} holds {value!r:.80} ({type(value).__name__}); allowed: {allowed}")
    return list(values)  # array() would take bytes for the memory of its numbers
