"""A seccomp filter: system calls that no sandbox needs and that the limits and folders of a sandbox do not cover.

A denied call fails with EPERM. Landlock does not cover the metadata of files (``chmod``), nor the limits and priorities
of other processes of the user (``prlimit``). A limit on address space does not cover files in memory
(``memfd_create``), and RLIMIT_NPROC does not hold for root.
"""

from __future__ import annotations

import errno
import platform
import struct

DENIED: dict[str, tuple[int, int | None]] = {
    # another process; threads are allowed, see `clone` below
    "fork": (57, None), "vfork": (58, None), "unshare": (272, 97),
    # memory that a limit on address space does not count
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "io_uring_setup": (425, 425),
    # network; a pair of sockets is allowed, and one of them could reach a socket in a folder that is shown
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # other processes of the same user
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    # metadata of files
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
    # the machine
    "clock_settime": (227, 112), "settimeofday": (164, 170), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218),
}  # fmt: skip
"""{system call: (number on x86_64, number on aarch64)}."""
MACHINES = {"x86_64": (0, 0xC000003E, 56, 302, 44, 157), "aarch64": (1, 0xC00000B7, 220, 261, 206, 167)}
"""{machine: (column of DENIED, AUDIT_ARCH, numbers of clone, prlimit64, sendto and prctl)}."""
CLONE3 = 435
CLONE_THREAD = 0x00010000
PR_SET_PDEATHSIG = 1
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCH, ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``. The low half of an argument comes first on both machines."""


def seccomp_filter(machine: str | None = None) -> bytes:
    """The program of the filter, an array of ``struct sock_filter``.

    Args:
        machine: name as in ``platform.machine()``; None: this machine.

    Raises ValueError for a machine whose system calls are not known.
    """
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise ValueError(f"there is no system call filter for {machine}; supported are {' and '.join(MACHINES)}")
    column, arch, clone, prlimit, sendto, prctl = MACHINES[machine]
    denied = [number for numbers in DENIED.values() if (number := numbers[column]) is not None]
    refuse = (RETURN, 0, 0, ERRNO | errno.EPERM)
    program = [(LOAD, 0, 0, ARCH), (JUMP_EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    program += [(JUMP_AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]  # the x32 calls of x86_64
    for number in denied:
        program += [(JUMP_EQUAL, 0, 1, number), refuse]
    # without clone3 the C library uses clone, whose flags a filter can read
    program += [(JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ERRNO | errno.ENOSYS)]
    allow = (RETURN, 0, 0, ALLOW)
    program += [(JUMP_EQUAL, 0, 4, clone), (LOAD, 0, 0, ARGUMENTS), (JUMP_ANY_BIT, 0, 1, CLONE_THREAD), allow, refuse]
    # the fifth argument of sendto is an address, in two halves; 0: the other end of the pair
    address = ARGUMENTS + 4 * 8
    program += [
        (JUMP_EQUAL, 0, 6, sendto), (LOAD, 0, 0, address), (JUMP_EQUAL, 0, 2, 0), (LOAD, 0, 0, address + 4),
        (JUMP_EQUAL, 1, 0, 0), refuse, allow,
    ]  # fmt: skip
    # a program must not unset the signal that ends it with the launcher process
    program += [(JUMP_EQUAL, 0, 4, prctl), (LOAD, 0, 0, ARGUMENTS), (JUMP_EQUAL, 0, 1, PR_SET_PDEATHSIG), refuse, allow]
    # the first argument of prlimit64 is the process; 0: the caller
    program += [(JUMP_EQUAL, 0, 4, prlimit), (LOAD, 0, 0, ARGUMENTS), (JUMP_EQUAL, 0, 1, 0), allow, refuse, allow]
    return b"".join(struct.pack("=HBBI", *words) for words in program)
