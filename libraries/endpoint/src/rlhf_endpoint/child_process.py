"""The environment of programs, their output and their end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

_PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "NO_PROXY", "no_proxy",
)  # fmt: skip
"""Variables of the run's environment that are passed to a program. Others may be secrets."""
_PYTHON_VARIABLES = ("PYTHONPATH", "VIRTUAL_ENV")
"""Those that name packages of the run's Python, which another Python must not import."""


def passed_environment(names: Sequence[str], python: str | None = None) -> dict[str, str]:
    """The variables that are passed to every program, and those in ``names``.

    Args:
        python: path of the program's own Python, whose programs then come first on PATH. None: that of the run.
    """
    passed = _PASSED if python is None else [name for name in _PASSED if name not in _PYTHON_VARIABLES]
    variables = {
        **{name: os.environ[name] for name in (*passed, *names) if name in os.environ},
        **{name: value for name, value in os.environ.items() if name.startswith("LC_")},
    }
    if python is None:
        return variables
    folder = os.path.dirname(os.path.abspath(python))
    return variables | {"PATH": os.pathsep.join([folder, *filter(None, [variables.get("PATH")])])}


class Pipe:
    """The last bytes that were written into a pipe. It is always read, so writers never wait."""

    def __init__(self, keep: int) -> None:
        self._keep, self.tail = keep, bytearray()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)

    def start(self) -> None:
        """Read from now on, whenever there is data. Called after the process received its end of the pipe."""
        os.close(self.write_end)
        self.write_end = -1
        asyncio.get_running_loop().add_reader(self._read_end, self._read_part)

    def read(self) -> None:
        """Read what has been written so far, without waiting for more."""
        while self._read_part():
            pass

    def text(self) -> str:
        """The bytes as text, to be appended to a message."""
        text = bytes(self.tail).decode(errors="replace").strip()
        return f". The end of its output:\n{text}" if text else " and printed nothing"

    def close(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)

    def _read_part(self) -> bool:
        try:
            data = os.read(self._read_end, 2**16)
        except (BlockingIOError, InterruptedError):
            return False
        if not data:  # every writer has closed it
            asyncio.get_running_loop().remove_reader(self._read_end)
        self.tail += data
        del self.tail[: -self._keep]
        return bool(data)


def ending(code: int) -> str:
    """How a process with this return code ended, for messages."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
