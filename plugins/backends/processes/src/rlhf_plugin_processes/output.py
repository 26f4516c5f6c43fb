"""The output of workers: where it is kept, and showing it while it comes."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO

from rlhf_workers.driver.handle import slug

from rlhf_plugin_processes.shared_values import Descriptor

_LOOK_SECONDS = 0.2


def open_log(folder: Path | None, worker: str) -> tuple[Descriptor, str]:
    """The file for the output of a worker, and a path at which this process can read it.

    Args:
        folder: None: the file has no name in any folder, and goes with the run.
    """
    if folder is None:
        with tempfile.TemporaryFile(prefix="rlhf-") as file:
            nameless = Descriptor(os.dup(file.fileno()))
        return nameless, f"/proc/{os.getpid()}/fd/{nameless.number}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{slug(worker)}.log"
    return Descriptor(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)), str(path.absolute())


class OutputPrinter:
    """Prints what workers write, from :meth:`add` on, each line with the worker's name."""

    def __init__(self) -> None:
        self._files: list[tuple[str, IO[bytes]]] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, worker: str, path: str) -> None:
        file = open(path, "rb")  # noqa: SIM115
        file.seek(0, os.SEEK_END)
        self._files.append((worker, file))
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="output of workers", daemon=True)
            self._thread.start()

    def _follow(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            self._show(whole=False)

    def _show(self, whole: bool) -> None:
        """``whole``: also a last line that has no end."""
        for worker, file in list(self._files):
            while line := file.readline():
                if not line.endswith(b"\n") and not whole:
                    file.seek(-len(line), os.SEEK_CUR)
                    break
                sys.stdout.write(f"({worker}) {line.decode(errors='replace').rstrip()}\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Print what is left."""
        if self._thread is not None:
            self._closed.set()
            self._thread.join()
            self._show(whole=True)
            for _, file in self._files:
                file.close()
            self._thread, self._files = None, []
            self._closed.clear()
