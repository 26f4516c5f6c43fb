"""A file that is made in parts over a long time: whole or absent, and never begun twice.

Parts are appended to ``NAME.partial``, one line each, behind a line that says what the file is made of. A process that
dies loses at most the part it was writing; another that makes the same goes on behind the last whole one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError, ConfigError

from rlhf_runtime.checkpoint.atomic_files import TEMPORARY, sync_file
from rlhf_runtime.checkpoint.json_values import dumps, loads


class PartialFile:
    """``for part in resume(): ...``, then ``add(part)`` until done, then ``publish()``. A part is a JSON object.

    Args:
        about: JSON values that must agree for parts of two processes to belong together.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path, self.about = path, dict(about)
        self.partial = path.with_name(f"{path.name}.partial")

    def resume(self) -> Iterator[dict[str, Any]]:
        """Parts that are there already; what a dying process left of another is cut off. To be read to its end.

        Raises ConfigError where they are of something else, and says of what.
        """
        if not self.partial.is_file():
            self._append(self.about)
            return
        whole = 0
        with self.partial.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                part = loads(line.decode(), f"{self.partial}:{number + 1}")
                whole += len(line)
                if number:
                    yield part
                elif differing := sorted(k for k in {*self.about, *part} if self.about.get(k) != part.get(k)):
                    raise ConfigError(
                        f"{self.partial} was begun with another {', another '.join(differing)}: go on with what it was "
                        "begun with, or remove it (--force)"
                    )
        os.truncate(self.partial, whole)
        if not whole:
            self._append(self.about)

    def add(self, part: Mapping[str, Any]) -> None:
        """Append a part; it is on the disk when this returns."""
        self._append(part)

    def publish(self, key: str) -> None:
        """Write the file: of every part the texts in the list ``key``, a line each. The parts are removed."""
        temporary = self.path.with_name(f"{TEMPORARY}{self.path.name}")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                for part in self.resume():
                    file.writelines(f"{text}\n" for text in part[key])
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_file(self.path.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the parts."""
        self.partial.unlink(missing_ok=True)

    def _append(self, part: Mapping[str, Any]) -> None:
        try:
            with self.partial.open("ab") as file:
                file.write((dumps(part, self.partial.name) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as cause:
            raise CheckpointError(
                f"{self.partial} could not be written: {cause}. What it holds already is kept: once there is room, the "
                "same call goes on from there."
            ) from cause
