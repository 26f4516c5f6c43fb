"""Checks of the machine: cores, memory, shared memory, file descriptors, ports, disk, environment variables.

The paths that a function reads are arguments, so that tests can give other paths.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from rlhf.control_groups import MEMBERSHIP, MEMINFO, ROOT, allowed_cores, cpu_limit, machine_memory, usable_cores
from rlhf.errors import short_list
from rlhf.interfaces import Finding

GIB = 2**30
SHM_MINIMUM = 2 * GIB
"""Smallest size in bytes. Ray stores its objects there, such as weights that are sent to the engines."""
FILES_MINIMUM = 8192
"""Number of open files. A Ray node with a few dozen workers needs this many for sockets, shards and pipes."""
DISK_WARN, DISK_FAIL = 10 * GIB, 1 * GIB
PORTS = 32

LIBRARIES = ("CUDA_", "DS_", "GLOO_", "HF_", "KMP_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "PYTORCH_", "RAY_", "TORCH_")
FRAMEWORKS = ("TRANSFORMERS_", "VLLM_", "WANDB_", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK", "WORLD_SIZE")
SYSTEM = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "PYTHONPATH", "LD_PRELOAD")
ENVIRONMENT = (*LIBRARIES, *FRAMEWORKS, *SYSTEM)
"""Variables (or their prefixes) that change the behaviour of torch, Ray, vLLM and DeepSpeed."""


def gib(size: float) -> str:
    """Bytes as ``12.3 GiB``."""
    return f"{size / GIB:.1f} GiB"


def cores(root: Path = ROOT, membership: Path = MEMBERSHIP, environment: Mapping[str, str] = os.environ) -> Finding:
    """Cores that this process may use, and whether torch would start more threads."""
    available, limit, usable = allowed_cores(), cpu_limit(root, membership), usable_cores(root, membership)
    text = f"{available} cores" + ("" if limit is None else f", limited by the cgroup to the time of {limit:g} cores")
    setting = environment.get("OMP_NUM_THREADS", "")
    if setting and not setting.isdigit():
        return Finding("cores", "warn", f"{text}; OMP_NUM_THREADS is not a number", "set OMP_NUM_THREADS to a number")
    threads = int(setting) if setting else available
    text += f"; torch uses {threads} threads a process (OMP_NUM_THREADS {'set' if setting else 'not set'})"
    if threads > usable:
        advice = f"set OMP_NUM_THREADS={usable} (less where several ranks share the machine)"
        return Finding("cores", "warn", text, f"more threads than cores make every step slower: {advice}")
    return Finding("cores", "ok", text)


def memory(root: Path = ROOT, membership: Path = MEMBERSHIP, meminfo: Path = MEMINFO) -> Finding:
    """Memory of the machine and of the control group."""
    sizes = machine_memory(root, membership, meminfo)
    if sizes is None:
        return Finding("memory", "skipped", f"this system has no {meminfo}")
    limit = "" if sizes.limit is None else f", limited to {gib(sizes.limit)} by the cgroup"
    return Finding("memory", "ok", f"{gib(sizes.total)}, {gib(sizes.available)} available{limit}")


def shared_memory(path: Path = Path("/dev/shm"), minimum: int = SHM_MINIMUM) -> Finding:
    """Size of the shared memory file system."""
    larger = "make it larger: docker run --shm-size=8g; Kubernetes: an emptyDir of medium Memory at /dev/shm"
    if not path.is_dir():
        text = f"there is no {path}"
        if sys.platform == "darwin":
            return Finding("shared memory", "skipped", f"{text} on macOS")
        return Finding("shared memory", "warn", text, f"Ray then keeps objects on the disk, which is slow; {larger}")
    stat = os.statvfs(path)
    total, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    text = f"{path}: {gib(total)}, {gib(free)} free"
    if not os.access(path, os.W_OK):
        return Finding("shared memory", "warn", f"{text}, not writable", f"chmod 1777 {path}")
    if total < minimum:
        need = f"Ray's object store and the weight sync need {gib(minimum)}"
        return Finding("shared memory", "warn", text, f"{need}; {larger}")
    if free < minimum:
        return Finding("shared memory", "warn", text, f"remove leftover files from {path}; {gib(minimum)} are needed")
    return Finding("shared memory", "ok", text)


def file_descriptors(minimum: int = FILES_MINIMUM) -> Finding:
    """The limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = ["unlimited" if n == resource.RLIM_INFINITY else str(n) for n in (soft, hard)]
    text = f"{limits[0]} open files (at most {limits[1]})"
    if soft != resource.RLIM_INFINITY and soft < minimum:
        is_allowed = hard == resource.RLIM_INFINITY or hard >= minimum
        command = f"ulimit -n {limits[1] if is_allowed else minimum}"
        advice = "" if is_allowed else " as root, or raise it in /etc/security/limits.conf"
        return Finding("open files", "warn", text, f"a cluster needs {minimum} and more: {command}{advice}")
    return Finding("open files", "ok", text)


def loopback(ports: int = PORTS) -> Finding:
    """Whether several servers at once can listen on the loopback interface and be reached."""
    opened: list[socket.socket] = []
    remedy = "roles use local ports: bring the interface up (ip link set lo up), or stop programs that hold the ports"
    try:
        for _ in range(ports):
            opened.append(socket.create_server(("127.0.0.1", 0)))
        for server in opened:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return Finding("loopback", "fail", f"127.0.0.1: {error.strerror or error}, after {len(opened)} ports", remedy)
    finally:
        for server in opened:
            server.close()
    return Finding("loopback", "ok", f"127.0.0.1: {ports} free ports opened and reached")


def disk(path: Path, name: str = "disk", need: int = 0, content: str = "") -> Finding:
    """Free space for ``path``. ``need``: bytes of ``content``, estimated from above, so that a lack is a warning."""
    usage = shutil.disk_usage(path)
    text = f"{path}: {gib(usage.free)} of {gib(usage.total)} free"
    if need:
        text += f"; {content} take about {gib(need)}"
    if usage.free < DISK_FAIL:
        return Finding(name, "fail", text, "free some space, choose another folder, or keep fewer checkpoints")
    if usage.free < max(DISK_WARN, need):
        return Finding(name, "warn", text, "free some space, choose another folder, or keep fewer checkpoints")
    return Finding(name, "ok", text)


def environment_variables(environment: Mapping[str, str] = os.environ) -> Finding:
    """Names, never values, of the variables that change the behaviour of the libraries."""
    names = sorted(name for name in environment if name.startswith(ENVIRONMENT))
    return Finding("environment", "ok", short_list(names, 40) or "no variables that torch, Ray, vLLM or DeepSpeed read")
