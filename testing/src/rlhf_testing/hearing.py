"""Passes on what a plugin prints while it is checked, with secrets replaced."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import uuid
from collections.abc import Iterator
from typing import TextIO

from rlhf.secrets import names_secret

DECOY = "RLHF_CHECK_API_KEY"
"""An environment variable that is set during the checks, to detect a plugin that prints the whole environment."""
_SHORTEST = 8
"""Minimum characters of a secret's value. Shorter values may occur in a text by chance."""


class Hearing:
    """Intercepts ``print`` and ``sys.stdout.write``. ``told`` holds the variables whose values were printed."""

    def __init__(self) -> None:
        self.leaks: set[str] = set()
        values = {name: value for name, value in os.environ.items() if names_secret(name) and len(value) >= _SHORTEST}
        self.secrets = {**values, DECOY: uuid.uuid4().hex}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        out, err = _Passing(self, sys.stdout), _Passing(self, sys.stderr)
        os.environ[DECOY] = self.secrets[DECOY]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield
        finally:
            os.environ.pop(DECOY, None)

    def hide(self, text: str) -> str:
        """The text with ``$NAME`` in place of each secret. The names are added to ``told``."""
        for name, value in self.secrets.items():
            if value in text:
                self.leaks.add(name)
                text = text.replace(value, f"${name}")
        return text


class _Passing(io.TextIOBase):
    """A stream that passes text on, without secrets."""

    def __init__(self, hearing: Hearing, to: TextIO) -> None:
        self._hearing, self._to = hearing, to

    def write(self, text: str) -> int:
        self._to.write(self._hearing.hide(text))
        return len(text)

    def flush(self) -> None:
        self._to.flush()

    def fileno(self) -> int:
        return self._to.fileno()

    def isatty(self) -> bool:
        return self._to.isatty()
