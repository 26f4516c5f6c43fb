"""The interpreter that runs the programs, and the files that it reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlhf.errors import ConfigError, brief

LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
"""Shared libraries and the cache of their locations."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}  # fmt: skip
"""All environment variables of a program. Sets of texts have the same order in every run. Without ``MALLOC_ARENA_MAX``
each thread reserves 64 MiB of the address space, which is too much for a pool of eight."""
ASK = """
import json, os, sys
print(json.dumps([os.path.realpath(sys.executable), sys.prefix, sys.base_prefix]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    command: tuple[str, ...]
    """Interpreter with its options; ``-c`` and a program follow."""
    paths: tuple[str, ...]
    """Files and folders that it reads."""


def interpreter(python: str | None) -> Interpreter:
    """Args:
        python: path of an interpreter whose installed packages programs may import. None: the interpreter of this
            process, and programs may import the standard library only.

    Raises ConfigError for a path that does not run Python.
    """
    program, prefix, base = _query(python) if python else _current()
    paths = [*LIBRARIES, program]
    if python:
        paths += [python, f"{prefix}/pyvenv.cfg", f"{prefix}/lib", f"{prefix}/lib64"]
    paths += [f"{base}/lib", f"{base}/lib64"]
    options = ("-s", "-B") if python else ("-s", "-B", "-S")
    return Interpreter(
        (python or program, *options), tuple(path for path in dict.fromkeys(paths) if Path(path).exists())
    )


def _current() -> tuple[str, str, str]:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable)), sys.base_prefix, sys.base_prefix


def _query(python: str) -> tuple[str, str, str]:
    if not os.path.isabs(python):
        raise ConfigError(f"reward 'code': interpreter = {brief(python)} is not an absolute path of an interpreter")
    try:
        done = subprocess.run([python, "-I", "-c", ASK], capture_output=True, timeout=60, check=True)
        program, prefix, base = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"reward 'code': interpreter = {brief(python)} does not run Python: {error}") from None
    return program, prefix, base
