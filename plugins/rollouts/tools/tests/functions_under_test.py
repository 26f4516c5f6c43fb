"""Functions that the tests offer as tools."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field


class Point(BaseModel):
    x: int
    y: int


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    The sum is exact.

    Args:
        a: the first number
        b: the second number
    """
    print("adding")  # must not be taken for an answer
    return a + b


def norm(p: Point, how: Literal["l1", "max"] = "l1", scale: Annotated[float, Field(gt=0)] = 1.0) -> float:
    """A norm."""
    return scale * (abs(p.x) + abs(p.y) if how == "l1" else max(abs(p.x), abs(p.y)))


def give(what: str) -> Any:
    """Return what is asked for."""
    return {
        "text": "hé",
        "json": {"a": [1, None, True]},
        "nothing": None,
        "long": "x" * 1000,
        "bytes": b"x",
        "nan": float("nan"),
        "keys": {1: 2},
        "surrogate": "\ud800",
        "object": object(),
    }[what]


def fail(message: str) -> str:
    """Raise."""
    raise ValueError(message)


def leave(code: int) -> str:
    """Exit the program."""
    raise SystemExit(code)


def crash() -> str:
    """End the process."""
    os.write(2, b"about to crash\n")
    os._exit(3)


def sleep(file: str) -> str:
    """Start a process that waits, write its id to a file, and wait."""
    child = subprocess.Popen(["sleep", "600"])
    with open(file, "w") as f:
        f.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    return "never"


def fork() -> str:
    """Return from two processes."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return f"child {child > 0}"


def worker() -> int:
    """The id of the process."""
    return os.getpid()


async def meet(name: str) -> str:
    """Wait until two calls are under way."""
    _met.append(name)
    while len(_met) < 2:
        await asyncio.sleep(0)
    return f"{name} of {sorted(_met)}"


async def wait() -> str:
    """Wait for ever."""
    await asyncio.sleep(600)
    return "never"


async def now() -> str:
    """The time."""
    return "noon"


async def long() -> str:
    """A long text."""
    return "x" * 1000


async def refuse() -> str:
    """Raise."""
    raise TimeoutError("the other side is slow")


_met: list[str] = []

not_a_function = 3


def undocumented(a: int) -> int:
    return a


def untyped(a) -> int:
    """No hint."""
    return a


def several(*a: int) -> int:
    """Any number of arguments."""
    return sum(a)


def unusual(a: object, b: asyncio.Task) -> int:
    """A type that JSON does not have."""
    return 0


def unknown(a: Missing) -> int:  # noqa: F821
    """A type that is not defined."""
    return 0
