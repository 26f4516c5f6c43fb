"""The output of a process. The last lines are kept for the error message about its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from typing import TextIO

KEPT_LINES = 12


class Output:
    """A pipe that a process writes to. Use it inside of a running event loop.

    Args:
        label: every line is shown on standard error after this label. None: lines are kept but not shown.
    """

    def __init__(self, label: str | None = None) -> None:
        self._label, self._lines, self._rest = label, deque[str](maxlen=KEPT_LINES), b""
        self._loop = asyncio.get_running_loop()
        self._read_end, write = os.pipe()
        os.set_blocking(self._read_end, False)
        self.stream: TextIO = os.fdopen(write, "w")
        """The process's end of the pipe."""
        self._loop.add_reader(self._read_end, self._receive)

    def started(self) -> None:
        """Call this when the process has its own copy of :attr:`stream`."""
        self.stream.close()

    def tail(self) -> str:
        """The last lines, to be appended to a message."""
        self._receive()
        lines = "\n  ".join(line for line in (*self._lines, _text(self._rest)) if line)
        return f". Its last output:\n  {lines}" if lines else ""

    def close(self) -> None:
        if self._read_end >= 0:
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self.stream.close()
            self._read_end = -1

    def _receive(self) -> None:
        """Read once, as much as a pipe holds. A loop would not end while a process prints without end, and the event
        loop would stop no call at its timeout."""
        if self._read_end < 0:
            return
        try:
            part = os.read(self._read_end, 1 << 16)
        except BlockingIOError:
            return
        if not part:
            self._loop.remove_reader(self._read_end)
            return
        *lines, self._rest = (self._rest + part).split(b"\n")
        self._rest = self._rest[-8192:]
        for line in map(_text, lines):
            self._lines.append(line)
            if self._label is not None:
                with contextlib.suppress(ValueError, OSError):  # stderr closed at interpreter exit
                    sys.stderr.write(f"[{self._label}] {line}\n")


def _text(line: bytes) -> str:
    return line[-1000:].decode(errors="replace").rstrip()
