"""Selects the sandbox: the first installed one that works."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rlhf.errors import ConfigError, RewardError

from rlhf_plugin_code.interpreter import Interpreter
from rlhf_plugin_code.limits import ProgramLimits
from rlhf_plugin_code.sandbox_launcher import SandboxLauncher

_LOG = logging.getLogger(__name__)
Choice = Literal["auto", "bwrap", "sandlock", "limits"]
REMEDY = (
    "Install bubblewrap 0.8 or newer (apt-get install bubblewrap), which needs user namespaces, or sandlock "
    "(pip install sandlock), which needs Linux 6.12 or newer with Landlock."
)
UNISOLATED = (
    "reward 'code': sandbox = 'limits' does not isolate. Programs of the policy read every file that this user can "
    "read and send signals to the processes of this user."
)


def candidates(choice: Choice) -> list[str]:
    """The installed sandboxes to try, the best first.

    Raises ConfigError, with what to install, if there is none.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError(
            f"reward 'code': programs run in a Linux sandbox, but this system is {sys.platform}. Train in a virtual "
            "machine or container with Linux, or use another reward."
        )
    if choice == "limits":
        return ["limits"]
    installed = {"bwrap": shutil.which("bwrap") is not None, "sandlock": find_spec("sandlock") is not None}
    names = [name for name in installed if choice in ("auto", name)]
    usable = [name for name in names if installed[name]]
    if not usable:
        raise ConfigError(f"reward 'code': sandbox = {choice!r}, but {' and '.join(names)} is not installed. {REMEDY}")
    return usable


async def working(names: Sequence[str], python: Interpreter, limits: ProgramLimits) -> SandboxLauncher:
    """The first of these sandboxes that isolates a program on this machine.

    Raises ConfigError, with the result of each sandbox, if there is none.
    """
    failures = []
    for name in names:
        launcher = None
        try:
            launcher = SandboxLauncher(name, python, limits)
            succeeded = await probe(launcher, limits.memory)
        except (RewardError, ValueError) as error:
            failures.append(str(error))
        else:
            if name == "limits":
                _LOG.warning("%s", UNISOLATED)
                return launcher
            if not succeeded:
                return launcher
            failures.append(
                f"the sandbox {name!r} allowed a program to do what it must prevent: {', '.join(succeeded)}"
            )
        if launcher is not None:
            launcher.close()
    raise ConfigError(f"reward 'code': no sandbox works on this machine. {'; '.join(failures)}. {REMEDY}")


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


async def probe(launcher: SandboxLauncher, memory: int) -> tuple[str, ...]:
    """Actions that a program could perform although a sandbox must prevent them; empty if the sandbox works. The probe
    does no harm.

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
