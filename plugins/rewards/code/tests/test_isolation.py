"""What each sandbox enforces: the table of the how-to page."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from groups import LIMITS
from rlhf_plugin_code.interpreter import interpreter
from rlhf_plugin_code.sandbox_launcher import SandboxLauncher

ATTEMPT = """
try:
    {}
    print('done')
except (OSError, ValueError):
    print('refused')
"""


def allowed(run, lines: Sequence[str]) -> list[str]:
    """The lines that a program could execute."""
    program = "import mmap, os, resource, socket, subprocess\n" + "".join(ATTEMPT.format(line) for line in lines)
    done = run(program).out.split()
    return [line for line, word in zip(lines, done, strict=True) if word != "refused"]


def test_no_files_of_the_machine_are_read(run, launcher, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    paths = ("/etc/passwd", "/etc/shadow", str(secret), __file__, "/proc/1/environ", "/proc/self/environ")
    assert allowed(run, [f"open({path!r}).read()" for path in paths]) == []
    assert allowed(run, [f"os.listdir({path!r})" for path in (str(tmp_path), "/proc", "/home", "/etc")]) == (
        ["os.listdir('/etc')"] if launcher.sandbox == "bwrap" else []
    )
    if launcher.sandbox == "bwrap":
        assert run("import os\nprint(os.listdir('/etc'))").out == "['ld.so.cache']\n"


def test_nothing_outside_is_changed(run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("text")
    old_stat = file.stat()
    lines = (
        "open({0!r}, 'w')", "os.unlink({0!r})", "os.rename({0!r}, {0!r} + 'x')", "os.truncate({0!r}, 0)",
        "os.chmod({0!r}, 0o777)", "os.utime({0!r}, (1, 1))", "os.chown({0!r}, 65534, 65534)",
        "os.setxattr({0!r}, 'user.a', b'1')", "os.symlink('/', {0!r} + 'x')", "os.mkfifo({0!r} + 'x')",
    )  # fmt: skip
    assert allowed(run, [line.format(str(file)) for line in lines]) == []
    after = file.stat()
    assert file.read_text() == "text"
    assert (old_stat.st_mode, old_stat.st_mtime_ns, old_stat.st_uid) == (after.st_mode, after.st_mtime_ns, after.st_uid)
    assert list(tmp_path.iterdir()) == [file]
    folders = ("/", "/dev", "/usr/lib", "/var/tmp", "/dev/shm", "/run")
    assert allowed(run, [f"open({folder + '/rlhf-code-new'!r}, 'w')" for folder in folders]) == []


def test_no_network(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        lines = [f"socket.create_connection({server.getsockname()!r}, 1)", "socket.socket(socket.AF_UNIX)"]
        lines += [
            f"socket.socket(socket.{name})" for name in ("AF_INET, socket.SOCK_DGRAM", "AF_NETLINK, socket.SOCK_RAW")
        ]
        assert allowed(run, lines) == []


def test_a_pair_of_sockets_reaches_each_other_only(run, launcher, tmp_path: Path) -> None:
    """A socket of a pair could be connected to a socket in a folder that is shown, such as the interpreter's."""
    path = str(tmp_path / "socket")
    instance = SandboxLauncher(
        launcher.sandbox, replace(interpreter(None), paths=(*interpreter(None).paths, str(tmp_path))), LIMITS
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        server.setblocking(False)
        lines = [
            f"a.connect({path!r})",
            f"a.sendto(b'x', {path!r})",
            f"a.sendmsg([b'x'], [], 0, {path!r})",
            "a.bind('x')",
        ]
        program = "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        program += "".join(ATTEMPT.format(line) for line in lines) + "a.send(b'ok')\nprint(b.recv(9))"
        try:
            assert asyncio.run(instance.run(program)).out.split() == ["refused"] * 4 + ["b'ok'"]
        finally:
            instance.close()
        with pytest.raises(BlockingIOError):
            server.recv(9)


def test_no_other_process_is_touched(run) -> None:
    victim = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        old_values = psutil.Process(victim.pid).nice(), os.sched_getaffinity(victim.pid)
        lines = (
            "os.kill({0}, 9)", "os.killpg({0}, 9)", "os.setpriority(os.PRIO_PROCESS, {0}, 19)",
            "os.sched_setaffinity({0}, [0])", "resource.prlimit({0}, resource.RLIMIT_NOFILE, (9, 9))",
        )  # fmt: skip
        assert allowed(run, [line.format(victim.pid) for line in lines]) == []
        assert victim.poll() is None
        assert (psutil.Process(victim.pid).nice(), os.sched_getaffinity(victim.pid)) == old_values
    finally:
        victim.kill()
        victim.communicate()


def test_killing_the_parent_does_not_end_the_next_program(run) -> None:
    run("import os\nfor pid in (os.getppid(), -1, 0):\n    try: os.kill(pid, 9)\n    except OSError: pass")
    assert run("print(1)").out == "1\n"


def test_no_process_is_started(run) -> None:
    assert allowed(run, ["os.fork()", "os.posix_spawn('/bin/true', ['true'], {})", "subprocess.run(['true'])"]) == []
    bomb = "import os\nfor _ in range(1000):\n    try: os.fork()\n    except OSError: continue\n    print('!')"
    assert run(bomb).out == ""


@pytest.fixture
def impatient(launcher):
    """The sandbox with a short limit of wall time."""
    instance = SandboxLauncher(launcher.sandbox, interpreter(None), replace(LIMITS, wall_seconds=1.5))
    yield instance
    instance.close()


def test_nothing_stays_behind(impatient) -> None:
    """A thread, a handler at exit and a new session do not outlive the program."""
    program = (
        "import os, signal, threading, time\n"
        "for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU): signal.signal(number, signal.SIG_IGN)\n"
        "try: os.setsid()\nexcept OSError: pass\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\nos.close(1)\nos.close(2)\n"
        "time.sleep(600)"
    )
    asyncio.run(impatient.run("pass"))  # starts the launcher process
    begin = psutil.Process().children(recursive=True)
    assert asyncio.run(impatient.run(program)).end == "wall"
    deadline = time.monotonic() + 5
    while left := [p for p in psutil.Process().children(recursive=True) if p not in begin and p.status() != "zombie"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_threads_work_and_are_limited(run) -> None:
    assert run("import threading\nt = threading.Thread(target=print, args=(3,))\nt.start()\nt.join()").out == "3\n"
    idiom = (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(20000)))\nt.start()\nt.join()"
    )
    assert run(idiom).out == "20000\n"
    bomb = (
        "import os, threading, time\nn = 0\ntry:\n"
        "    while True:\n        threading.Thread(target=time.sleep, args=(2,)).start()\n        n += 1\n"
        "except (RuntimeError, MemoryError):\n    os.write(1, str(n).encode())\n    time.sleep(2)"
    )
    result = run(bomb)
    assert result.end == "threads" or int(result.out) < 64  # the limit of the kernel does not hold for root
    small = bomb.replace("n = 0", "n = 0\nthreading.stack_size(2**15)")
    assert run(small).end == "threads" or int(result.out) < 64


def test_memory(run) -> None:
    for line in (
        "bytearray(300 * 2**20)", "[bytearray(2**20) for _ in range(300)]",
        "__import__('mmap').mmap(-1, 300 * 2**20)",
    ):  # fmt: skip
        result = run(f"try:\n    x = {line}\nexcept OSError as error:\n    raise MemoryError\nprint('done')")
        assert result.out == ""
        assert "MemoryError" in result.err
    lines = ["os.memfd_create('x')", "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))"]
    assert allowed(run, lines) == []


def test_disk(run, launcher) -> None:
    """bwrap: a folder of a fixed size. sandlock: no folder."""
    program = (
        "n = 0\ntry:\n    for i in range(100):\n        with open(str(i), 'wb') as file:\n"
        "            for _ in range(100): n += file.write(bytes(2**14))\nexcept OSError: pass\nprint(n)"
    )
    size = int(run(program).out)
    assert size == 0 if launcher.sandbox == "sandlock" else 2**19 < size <= 2**20
    if launcher.sandbox == "bwrap":
        assert run("import os\nprint(os.listdir('.'))").out == "[]\n"  # a new folder for each start
        empty = "import os\nfor i in range(10**7): os.close(os.open(str(i), os.O_CREAT | os.O_WRONLY))"
        assert run(empty).end == "files"
        linked = "import os\nopen('f', 'w')\nfor i in range(10**7): os.link('f', str(i))"
        assert run(linked).end == "files"


def test_output(run) -> None:
    result = run("while True: print('x' * 1000)")
    assert result.end == "output"
    assert len(result.out) < 300_000
    result = run("import sys\nfor i in range(10000): sys.stderr.write('x' * 1000)\nprint('end')")
    assert (result.out, len(result.err)) == ("end\n", 4096)


def test_processor_time(run) -> None:
    result = run("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass")
    assert (result.end, result.code != 0) == ("exit", True)
    assert result.seconds > 0.9


def test_the_environment_holds_no_secret_and_is_always_the_same(run, monkeypatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    program = "import os\nprint(sorted(os.environ), os.getcwd(), hash('a'), list({'a', 'b', 'c'}))"
    first = run(program).out
    assert "SECRET" not in first
    assert run(program).out == first


def test_other_than_the_limits_isolate_nothing(unisolated, tmp_path: Path) -> None:
    """What the option says about `limits`."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    program = f"import os\nprint(open({str(secret)!r}).read())\ntry: os.fork()\nexcept OSError: print('no process')"
    assert asyncio.run(unisolated.run(program)).out == "secret\nno process\n"
    lines = [f"open('/proc/{os.getpid()}/environ').read()", "os.kill(os.getppid(), 0)", f"open({str(secret)!r}, 'a')"]
    lines += [
        f"os.chmod({str(secret)!r}, 0o777)",
        "socket.socket()",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    ]
    lines += ["os.sched_setaffinity(os.getppid(), [0])", "os.memfd_create('x')"]
    assert allowed(lambda *words: asyncio.run(unisolated.run(*words)), lines) == (
        lines[:3] if os.geteuid() else lines[1:3]
    )
    assert "MemoryError" in asyncio.run(unisolated.run("bytearray(300 * 2**20)")).err
    folder = asyncio.run(unisolated.run("import os\nopen('a', 'w').close()\nprint(os.getcwd())")).out.strip()
    assert Path(folder).name.startswith("rlhf-code-")
    assert not Path(folder).exists()
