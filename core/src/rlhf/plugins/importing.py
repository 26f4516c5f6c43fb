"""The import of a plugin, which can neither end the process silently nor block it for ever."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rlhf.errors import PluginImportFailed

NOTE_SECONDS = 30.0
"""After this time a note says which line the import has reached."""
LIMIT_SECONDS = 600.0
"""After this time the import fails. Imports of large packages from a slow disk take minutes."""


@contextmanager
def importing(label: str) -> Iterator[None]:
    """Context manager around the import of a plugin.

    Raises PluginImportFailed if the plugin calls ``os._exit``, or takes more than :data:`LIMIT_SECONDS`. The limit
    works in the main thread only, because other threads cannot be interrupted.
    """
    thread, process, end_event = threading.get_ident(), os.getpid(), threading.Event()
    late: list[str] = []

    def leave(status: int) -> NoReturn:
        # a fork, or another thread that watches the driver, must be able to end its process
        if threading.get_ident() != thread or os.getpid() != process:
            leave_now(status)
        raise PluginImportFailed(f"{label}: it calls os._exit({status}) when it is imported, which would end the run")

    def watch() -> None:
        if end_event.wait(NOTE_SECONDS):
            return
        text = f"note: {label}: its import has taken {NOTE_SECONDS:g} s; it is at {place(thread)}. Ctrl-C ends the run."
        print(text, file=sys.stderr, flush=True)  # noqa: T201
        if not end_event.wait(LIMIT_SECONDS - NOTE_SECONDS) and thread == threading.main_thread().ident:
            late.append(place(thread))
            signal.pthread_kill(thread, signal.SIGINT)  # interrupts a wait too

    # os._exit() raises nothing, so a plugin that calls it would end the run without a message.
    leave_now, os._exit = os._exit, leave
    watcher = threading.Thread(target=watch, name="rlhf-import", daemon=True)
    watcher.start()
    try:
        yield
    except KeyboardInterrupt:
        # The signal of the limit. Any other interrupt is the user's Ctrl-C.
        if late:
            raise PluginImportFailed(f"{label}: its import took more than {LIMIT_SECONDS:g} s, at {late[0]}") from None
        raise
    finally:
        os._exit = leave_now
        end_event.set()
        watcher.join()


def place(thread: int | None) -> str:
    """The current line of a thread. Frames of Python's standard library are skipped if there is another frame."""
    library = sysconfig.get_path("stdlib")
    frame = sys._current_frames().get(thread or 0)
    while frame is not None and (frame.f_code.co_filename.startswith(library) or "<" in frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_name}() at {frame.f_code.co_filename}:{frame.f_lineno}"
