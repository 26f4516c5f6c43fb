"""Renders a chat template for the first time in a child process with limits.

A template is a program that comes with a model. The sandbox of jinja2 keeps it from files and from the interpreter, and
limits one range to 100,000, but neither nested loops nor the size of texts, which it even computes while it compiles.
This finds a template that is wrong or hostile by itself. It does not find one that is so for certain rows only.
"""

from __future__ import annotations

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError, DataError

SECONDS = 10
"""Of computing, which does not hang on what else the machine does."""
MEMORY = 2**30
LENGTH = 10_000_000
"""Characters that a template writes for a short conversation."""
_PATIENCE = 120.0
"""Seconds of waiting for the child process, if the machine gives it no time to compute."""
_TOO_MUCH_MEMORY, _TOO_LONG = 3, 4
_USER, _ANSWER = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
CONVERSATIONS: Sequence[Sequence[Mapping[str, Any]]] = (
    [_USER],
    [{"role": "system", "content": "Add."}, _USER],
    [_USER, _ANSWER, _USER],
)
_passed: set[str] = set()
"""Sources of templates that were tried in this process."""


def try_template(source: str, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
    """Raises ConfigError where the template needs more than the limits for a short conversation. Other errors of the
    template are left to the renders that follow.

    Args:
        source: the template's text.
        render: renders a conversation with it; raises DataError.
    """
    if source in _passed:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: the child only renders
        child = os.fork()
    if child == 0:
        _child(render)
    status = _wait(child)
    code = os.waitstatus_to_exitcode(status)
    problem = {
        _TOO_MUCH_MEMORY: f"needs more than {MEMORY // 2**20} MiB of memory",
        _TOO_LONG: f"writes more than {LENGTH:,} characters",
        -signal.SIGXCPU: f"computes for more than {SECONDS} s",
        -signal.SIGKILL: f"does not end within {SECONDS} s, or needs more memory than there is",
    }.get(code)
    if problem is not None:
        raise ConfigError(
            f"the chat template {problem} for a conversation of three words, so it is not used. Take the template that "
            "the model was published with, or name a file with another as data.chat_template."
        )
    _passed.add(source)


def _child(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
    """Render the conversations under the limits, and end the process."""
    code = 0
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        statm = Path("/proc/self/statm")
        if statm.exists():  # the address space so far is that of the parent process
            limit = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for messages in CONVERSATIONS:
            try:
                code = _TOO_LONG if len(render(messages)) > LENGTH else code
            except DataError as error:
                code = _TOO_MUCH_MEMORY if isinstance(error.__cause__, MemoryError) else code
    except MemoryError:
        code = _TOO_MUCH_MEMORY
    finally:
        os._exit(code)


def _wait(child: int) -> int:
    """The exit status of the child, which is killed if it does not end."""
    deadline, pause = time.monotonic() + _PATIENCE, 0.001
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    return ended[1]
