"""Run a probe in a child process with a deadline.

The child writes one JSON object per line to its standard output. Prints of libraries go to standard error. Both are
files, not pipes, because nobody would read these while the probe runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from typing import IO, Any

from rlhf.children import Child
from rlhf.interfaces import ProbeAnswer
from rlhf.interfaces.check import Probe

_TAIL = 64 * 1024
"""Bytes of standard error that are read."""


def ask(probe: Probe, argument: Any = None, timeout: float = 120.0) -> ProbeAnswer:
    """Run a probe in a new interpreter with this process's environment.

    Args:
        probe: a function at the top of an importable module.
        argument: a JSON value that is passed to the probe.
        timeout: seconds after which the child and all its descendants are killed.
    """
    # -P: like the program `rlhf`, do not import files of the current folder
    words = [probe.__module__, probe.__qualname__, json.dumps(argument)]
    command = [sys.executable, "-P", "-m", "rlhf_cli.doctor.probe_process", *words]
    start = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = Child(command, stdout=out.fileno(), stderr=err.fileno())
        try:
            late = not child.ends_within(timeout)
        finally:  # also when the doctor is interrupted
            child.end()
            code = child.wait()
        seconds = time.monotonic() - start
        lines, log = _lines(out), _tail(err)
    values = [line["value"] for line in lines if "value" in line]
    raised = [line["error"] for line in lines if "error" in line]
    if raised:
        error = raised[0]
    # A probe that reported an error may hang while it ends, so its error comes first.
    elif late:
        error = f"no answer within {timeout:g} s"
    elif code < 0:
        error = f"killed by {signal.Signals(-code).name}"
    elif code:
        error = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
        error = error or f"ended with exit code {code}"
    else:
        error = "" if values else "ended without an answer"
    return ProbeAnswer(seconds, error, log, values)


def _lines(file: IO[bytes]) -> list[dict[str, Any]]:
    file.seek(0)
    lines = file.read().decode(errors="replace").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # an incomplete last line was cut off when the child died


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    return file.read().decode(errors="replace")
