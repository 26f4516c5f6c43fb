"""Runs the commands of an example. Each is printed first, so that it can be repeated and changed by hand."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence

STOPPED = 130
"""The exit code after a Ctrl-C, as in shells."""
AGAIN = "The same command starts again from the beginning"


def execute(command: Sequence[str]) -> int:
    """Run a command with this Python's `rlhf`; returns its exit code, or STOPPED after a Ctrl-C."""
    words = [sys.executable, *(("-m", "rlhf_cli.main") if command[0] == "rlhf" else ()), *command[1:]]
    child, stopped = subprocess.Popen(words), False
    while child.returncode is None:
        try:
            child.wait()
        except KeyboardInterrupt:  # the child process gets the signal too, finishes its step and saves
            stopped = True
    return STOPPED if stopped else child.returncode


def run(*command: str, execute: Callable[[Sequence[str]], int] = execute, after_stop: str = AGAIN) -> None:
    """Print a command and execute it; end the program if it fails or is stopped."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    if code := execute([*command]):
        text = f"`{shlex.join(command)}` failed; the message above says why"
        sys.exit(f"stopped. {after_stop}" if code == STOPPED else text)
