"""Whether a sandbox works on this machine: a program tries what must not succeed."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from rlhf.errors import RewardError

from rlhf_plugin_code.launcher import Launcher

ATTEMPTS = """
import mmap, os, resource, socket

def read(): open({secret!r}).read()
def write(): open({secret!r}, "a").write("x")
def create(): open({beside!r}, "w").close()
def change_metadata(): os.chmod({secret!r}, 0o777)
def connect():
    with socket.socket() as s:
        s.settimeout(1)
        s.connect(("127.0.0.1", {port}))
def start_a_process(): os.fork() or os._exit(0)
def signal_outside(): os.kill({pid}, 0)
def change_limits_outside(): resource.prlimit({pid}, resource.RLIMIT_NOFILE)
def memory(): mmap.mmap(-1, {memory} + 1)

for attempt in ({names}):
    try:
        attempt()
    except (OSError, ValueError):
        continue
    print(attempt.__name__)
print("end")
"""
NAMES = (
    "read", "write", "create", "change_metadata", "connect", "start_a_process", "signal_outside",
    "change_limits_outside", "memory",
)  # fmt: skip


async def probe(launcher: Launcher, memory: int) -> tuple[str, ...]:
    """What a program could do that no sandbox allows; empty where the sandbox works. Nothing is harmed.

    Raises RewardError if no program can be started.
    """
    with (
        tempfile.TemporaryDirectory(prefix="rlhf-code-probe-") as folder,
        socket.create_server(("127.0.0.1", 0)) as port,
    ):
        secret = Path(folder, "secret")
        secret.write_text("secret")
        pid = os.getpid()
        names = NAMES if pid > 9 else [name for name in NAMES if not name.endswith("outside")]  # may exist inside too
        program = ATTEMPTS.format(
            secret=str(secret), beside=str(Path(folder, "new")), port=port.getsockname()[1], pid=pid, memory=memory,
            names=", ".join([*names, ""]),
        )  # fmt: skip
        run = await launcher.run(program)
    *succeeded, end = run.out.split() or [""]
    if end != "end":
        raise RewardError(f"the first program did not end by itself: {run.err or run}")
    return tuple(succeeded)
