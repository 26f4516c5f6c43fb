"""Resource limits of a program."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
OPEN_FILES = 64
THREADS = 64
FILE_BYTES = 4096
"""The temporary folder may hold one file, folder or link per this number of bytes of its size."""
LOOK_SECONDS = 0.05
"""Interval between two counts of threads and files. The kernel limits neither threads of root nor files of a folder in
memory."""


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The limits of one start of a program."""

    cpu_seconds: int
    wall_seconds: float
    memory: int
    """Bytes of address space."""
    disk: int
    """Bytes of the temporary folder; 0: there is none."""
    output: int
    """Bytes of standard output."""

    def of_process(self, own_user: bool) -> dict[str, tuple[int, int]]:
        """{RLIMIT name: (soft, hard)}, set inside the sandbox before the program begins.

        Args:
            own_user: whether processes of the user outside the sandbox do not count. Only then the number of threads
                can be limited.
        """
        limits = {
            "RLIMIT_CPU": (self.cpu_seconds, self.cpu_seconds),
            "RLIMIT_AS": (self.memory, self.memory),
            "RLIMIT_FSIZE": (self.disk, self.disk),
            "RLIMIT_NOFILE": (OPEN_FILES, OPEN_FILES),
            "RLIMIT_CORE": (0, 0),
        }
        return {**limits, "RLIMIT_NPROC": (THREADS, THREADS)} if own_user else limits
