"""A file that is written in parts over a long time. It is complete or absent, and an interrupted job can continue it.

Parts are appended to ``NAME.partial``, one line each, after a first line that describes the job's input. A process that
dies loses at most the part that it was writing. Another process with the same input continues after the last complete
part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError, ConfigError

from rlhf_runtime.checkpoint.atomic_files import replace_file
from rlhf_runtime.checkpoint.json_values import dumps, loads


class PartialFile:
    """``for part in resume(): ...``, then ``add(part)`` until done, then ``publish()``. A part is a JSON object.

    Args:
        header: JSON values that describe the job's input. Parts of another process are used only if its values are
            equal.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.header = path, dict(header)
        self.partial = path.with_name(f"{path.name}.partial")
        self._size = 0

    def resume(self) -> Iterator[dict[str, Any]]:
        """Parts that exist already. An incomplete last part is removed. The caller must exhaust the iterator.

        Raises ConfigError if the parts were made from another input, naming the difference.
        """
        if not self.partial.is_file():
            self._append(self.header)
            return
        size = 0
        with self.partial.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                part = loads(line.decode(), f"{self.partial}:{number + 1}")
                size += len(line)
                if number:
                    yield part
                elif differing := sorted(k for k in {*self.header, *part} if self.header.get(k) != part.get(k)):
                    raise ConfigError(
                        f"{self.partial} was started with different values of {', '.join(differing)}. Use the same "
                        "values to continue it, or remove it (--force)"
                    )
        # Else the next part would be appended to the incomplete line.
        os.truncate(self.partial, size)
        self._size = size
        if not size:
            self._append(self.header)

    def add(self, part: Mapping[str, Any]) -> None:
        """Append a part. The part is on the disk when this returns.

        Raises CheckpointError if the file cannot be written, or if another process has written to it.
        """
        self._append(part)

    def publish(self, key: str) -> None:
        """Write the file: the texts in the list ``key`` of every part, one per line. The parts are removed."""
        with self._writing(self.path):
            replace_file(
                self.path,
                lambda file: file.writelines(f"{text}\n".encode() for part in self.resume() for text in part[key]),
            )
        self.discard()

    def discard(self) -> None:
        """Remove the parts."""
        self.partial.unlink(missing_ok=True)

    def _append(self, part: Mapping[str, Any]) -> None:
        if (self.partial.stat().st_size if self.partial.exists() else 0) != self._size:
            raise CheckpointError(
                f"another process writes to {self.partial}, for the same {self.path.name}. It continues, and this one "
                "ends here: write to another file."
            )
        with self._writing(self.partial), self.partial.open("ab") as file:
            file.write((dumps(part, self.partial.name) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
            self._size = file.tell()

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as cause:
            raise CheckpointError(
                f"{path} could not be written: {cause}. The complete parts are kept in {self.partial}: free some space "
                "and repeat the same call to continue."
            ) from cause
