"""Runs the commands of the quick start. Each is printed first, so that it can be repeated and changed by hand."""

from __future__ import annotations

import shlex
import subprocess
import sys


def run(*command: str) -> None:
    """Print a command and run it with this Python; end the program if it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    words = [sys.executable, *(("-m", "rlhf_cli.main") if command[0] == "rlhf" else ()), *command[1:]]
    child, stopped = subprocess.Popen(words), False
    while child.returncode is None:
        try:
            child.wait()
        except KeyboardInterrupt:  # the child process gets the signal too, finishes its step and saves
            stopped = True
    if stopped:
        sys.exit("stopped. The same command starts again from the beginning")
    if child.returncode:
        sys.exit(f"`{shlex.join(command)}` failed; the message above says why")
