"""Stopping on request: finish the step, save, exit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """SIGTERM, Ctrl-C and SIGHUP (a terminal was closed) set ``requested``, which the loop reads between steps. A
    second Ctrl-C stops at once. SIGHUP stays ignored if it already was (``nohup``)::

        with StopRequest() as stop:
            for step in steps:
                ...
                if stop.requested:
                    break

    Handlers are installed only in the main thread, because Python allows no other. They are restored at the end.

    Args:
        promise: text about what the run will do, shown at the first signal.
        show: called in a signal handler with a line for the user. Returns whether it will be shown.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(
        self,
        promise: str = "stopping after this step, with a checkpoint",
        show: Callable[[str], bool] = lambda text: False,
    ) -> None:
        self.promise, self._show = promise, show
        self.callback: Callable[[], object] = lambda: None
        """Called at the first request, in a signal handler or by :meth:`request`."""
        self.requested = False
        self.reason = ""
        """Name of the signal, or the reason given to :meth:`request`."""
        self.signal: signal.Signals | None = None
        """The first signal that was received."""
        self._previous: dict[signal.Signals, Any] = {}

    def request(self, reason: str) -> None:
        """Ask for a stop at the next step boundary, from code instead of a signal."""
        first, self.requested, self.reason = not self.requested, True, reason
        if first:
            self.callback()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # After a stop that code requested, the first Ctrl-C still waits for the checkpoint.
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("second Ctrl-C: stopped without saving")
        self.signal = self.signal or signal.Signals(number)
        self.request(signal.Signals(number).name)
        text = f"{self.reason}: {self.promise} (Ctrl-C stops at once)"
        if not self._show(text):  # os.write, because a handler may run in the middle of a print
            with suppress(OSError):  # a full disk, a closed pipe: the run stops as asked all the same
                os.write(2, f"\n{text}\n".encode())
