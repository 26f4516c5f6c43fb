"""Functions that run in a separate process on a worker's node. They use the standard library only."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path

_SPY_SECONDS = 10.0


def log_tail(path: str, lines: int) -> str:
    """The last lines of a worker's log, without the marker lines that Ray writes."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            last = deque((line for line in file if not line.startswith((":job_id:", ":actor_name:"))), lines)
    except OSError as cause:
        return f"({path} cannot be read: {cause.strerror})"
    return "".join(f"  {line.rstrip()}\n" for line in last).rstrip() or "  (nothing)"


def inspect_process(pid: int) -> str:
    """What another process can see of a process that does not answer: for each thread its state and the kernel function
    in which it waits. Also its Python stacks, if py-spy is installed and has permission to read them."""
    folder = Path("/proc") / str(pid)
    lines = [f"State: {_state(folder)}"]
    for task in sorted(folder.glob("task/*"), key=lambda t: int(t.name)):
        if task.name == str(pid) or "(running)" in _state(task) or "disk" in _state(task):
            # The file holds 0 for a thread that does not wait in the kernel.
            waits = _read(task / "wchan").strip("0\n")
            lines.append(
                f"thread {task.name} {_read(task / 'comm').strip()}: {_state(task)}" + f", in {waits}" * bool(waits)
            )
    return "\n".join([*lines, _spied(pid)])


def _state(folder: Path) -> str:
    """``T (stopped)``, ``S (sleeping)``, ``D (disk sleep)``, ..."""
    states = [
        line.partition(":")[2].strip() for line in _read(folder / "status").splitlines() if line.startswith("State:")
    ]
    return states[0] if states else "gone"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended, or may not be read
        return ""


def _spied(pid: int) -> str:
    # First beside this Python: a virtual environment that is not activated is not on the PATH.
    tool = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if tool is None:
        return "No Python stacks: py-spy is not installed on the node (pip install py-spy)."
    command = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_SPY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as cause:
        return f"No Python stacks: py-spy failed: {cause}"
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"No Python stacks: py-spy: {last} (it needs to be root, or the SYS_PTRACE capability)"
    return process.stdout.strip()
