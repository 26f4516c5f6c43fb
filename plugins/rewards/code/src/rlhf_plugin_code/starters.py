"""Start a program in each kind of sandbox. Used by the launcher process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any, Protocol

from rlhf_plugin_code.interpreter import ENVIRONMENT, Interpreter
from rlhf_plugin_code.limits import ProgramLimits

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
PIPE = subprocess.PIPE


class Started(Protocol):
    """A program that runs, with pipes to its standard streams."""

    @property
    def pid(self) -> Any: ...

    stdin: Any
    stdout: Any
    stderr: Any

    def kill(self) -> None: ...

    def wait(self) -> Any: ...


class Bwrap:
    """Namespaces by the program ``bwrap``: a separate view of files, no network, no other processes."""

    own_user = True
    """See :meth:`ProgramLimits.of_process`."""
    filters_outside = True
    """Whether the filter of system calls is set by the sandbox, before the interpreter starts."""
    disk = True
    """Whether there is a temporary folder."""
    parents = 2
    """Number of processes of the sandbox above the program. If not 0, the temporary folder is in memory, including
    empty files."""
    drops_capabilities = True
    """Whether the sandbox itself drops the program's root capabilities. The sandbox needs them to map the user."""

    def __init__(self, python: Interpreter, limits: ProgramLimits, filter_: bytes) -> None:
        self._filter = filter_
        binds = [word for path in python.paths for word in ("--ro-bind", path, path)]
        devices = [word for path in DEVICES for word in ("--dev-bind", path, path)]
        variables = [word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)]
        # --unshare-all does without a user namespace where there is none; --unshare-user fails there
        # its own session, because a signal to the process group would reach bwrap and the launcher process outside
        self._command = [
            "bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534",
            "--cap-drop", "ALL", "--die-with-parent", "--new-session", "--clearenv", *variables,
            "--size", str(limits.disk), "--tmpfs", "/tmp", *binds,  # the interpreter may be in /tmp
            "--tmpfs", "/dev", *devices, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp",
        ]  # fmt: skip
        self._python = list(python.command)

    def start(self, source: str) -> Started:
        read_end, write_end = os.pipe()
        try:
            os.write(write_end, self._filter)  # smaller than a pipe's buffer
            os.close(write_end)
            command = [*self._command, "--seccomp", str(read_end), *self._python, "-c", source]
            return subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, pass_fds=(read_end,))
        finally:
            os.close(read_end)


class Sandlock:
    """Landlock and seccomp by the package ``sandlock``, which needs no namespaces. It has no writable folder."""

    own_user = False
    filters_outside = False
    disk = False
    parents = 0
    drops_capabilities = False

    def __init__(self, python: Interpreter, limits: ProgramLimits, filter_: bytes) -> None:
        self._python = python

    def start(self, source: str) -> Started:
        from sandlock import Sandbox
        from sandlock.sandbox import StdioMode

        sandbox = Sandbox(
            fs_readable=[*self._python.paths, "/dev/zero", "/dev/urandom", "/dev/random"],
            fs_writable=["/dev/null"],
            max_processes=1,
            no_coredump=True,
            clean_env=True,
            env=ENVIRONMENT,
            cwd="/",
        )
        pipes = {"stdin": StdioMode.PIPED, "stdout": StdioMode.PIPED, "stderr": StdioMode.PIPED}
        return sandbox.popen([*self._python.command, "-c", source], **pipes)


class LimitsOnly:
    """Resource limits and the filter of system calls. The program reads all files of the user, and writes some."""

    own_user = False
    filters_outside = False
    disk = True
    parents = 0
    drops_capabilities = False

    def __init__(self, python: Interpreter, limits: ProgramLimits, filter_: bytes) -> None:
        self._python = python

    def start(self, source: str) -> Started:
        return _WithFolder([*self._python.command, "-c", source])


class _WithFolder(subprocess.Popen[bytes]):
    """A process in a new folder, which is removed when the process ends."""

    def __init__(self, command: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rlhf-code-", ignore_cleanup_errors=True)
        environment = {**ENVIRONMENT, "HOME": self._folder.name, "TMPDIR": self._folder.name}
        super().__init__(
            command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment, cwd=self._folder.name,
            start_new_session=True,
        )  # fmt: skip

    def wait(self, timeout: float | None = None) -> int:
        try:
            return super().wait(timeout)
        finally:
            if self.returncode is not None:
                self._folder.cleanup()


STARTERS: dict[str, Any] = {"bwrap": Bwrap, "sandlock": Sandlock, "limits": LimitsOnly}


def drop_capabilities() -> None:
    """Drop root's capabilities, for this thread and all processes that it starts. Other users have none."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    drop_from_bounding_set, version = 24, 0x20080522
    # first, because it needs a capability: root would get those of the bounding set back at each exec
    for capability in range(64):
        libc.prctl(drop_from_bounding_set, capability, 0, 0, 0)
    header, empty_sets = (ctypes.c_uint32 * 2)(version, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(header, empty_sets):
        sys.exit(f"the launcher process cannot give up its capabilities: {os.strerror(ctypes.get_errno())}")
