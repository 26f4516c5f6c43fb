"""The command `rlhf` in processes that tests can kill, without a new import of torch for each.

A server process imports everything once, starts no threads, and forks a child per run::

    with Forks(folder) as forks:
        process = forks.start(["train", "run.toml"])
        process.kill()
        assert process.wait() == -9

Other Python programs can also run in such a child, with their own folder and environment::

        process = forks.start(["script.py"], place=Place("python", folder, {**os.environ, "PYTHONPATH": "..."}))
"""

from __future__ import annotations

import gc
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Place:
    """The program, folder and environment of a child that does not run ``rlhf``."""

    program: str
    """``rlhf``; ``python``, whose first argument is a file; or the name of a module, run like ``python -m``."""
    folder: str
    environment: Mapping[str, str]
    """The complete environment. Its ``PYTHONPATH`` is searched; the folder of these tests is not."""


class Forks:
    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        root = Path(__file__).parent.parent
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        # passive: threads of a busy machine sleep while they wait for each other
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        environment = {**os.environ, **threads, "PYTHONPATH": path}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=root,
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)
        self._server.stdout.close()

    def start(
        self, arguments: Sequence[str], limits: Mapping[str, int] | None = None, place: Place | None = None
    ) -> Process:
        """Run ``rlhf`` with ``arguments``. ``limits``: {name of a limit in ``resource``: value}."""
        self._count += 1
        log = self._folder / f"{self._count:03}.log"
        log.touch()  # may be read before the child has opened it
        request = {"run": list(arguments), "log": str(log), "limits": dict(limits or {})}
        pid = self.ask({**request, "place": asdict(place) if place else None})
        return Process(self, pid, log)

    def start_in_terminal(self, arguments: Sequence[str], **environment: str) -> tuple[Process, int]:
        """Run ``rlhf`` in a terminal, of which the process is in control. Returns the terminal's other end too, whose
        reads raise OSError once the process has ended."""
        place = Place("rlhf", os.getcwd(), {**os.environ, **environment})
        terminal, device = pty.openpty()
        request = {"run": list(arguments), "terminal": os.ttyname(device), "limits": {}, "place": asdict(place)}
        pid = self.ask(request)
        os.close(device)
        return Process(self, pid, Path(os.devnull)), terminal

    def ask(self, request: Mapping[str, Any]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


@dataclass
class Process:
    """A run in its own process. ``wait`` must be called once."""

    forks: Forks
    pid: int
    log: Path

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit code, or minus the signal that killed it."""
        return self.forks.ask({"wait": self.pid})

    def until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Wait until ``condition`` holds; it is checked every millisecond."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds} s in vain:\n{self.output}"
            time.sleep(0.001)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


def serve() -> None:
    import threading

    import rlhf_runtime.setup.build  # noqa: F401
    import transformers.models.auto.tokenization_auto
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401
    from rlhf.plugins import Plugins
    from rlhf_cli.main import main

    plugins = Plugins.discover()
    for kind in ("algorithm", "trainer", "generator", "launcher", "rollout", "loss", "advantage", "env"):
        for entry in plugins.list(kind):
            plugins.resolve(kind, entry.name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.freeze()  # no child looks for garbage in all that was imported
    for line in sys.stdin:
        request = json.loads(line)
        if "run" in request:
            device = os.open(request["terminal"], os.O_RDWR | os.O_NOCTTY) if "terminal" in request else None
            pid = os.fork()
            if pid == 0:
                _child(request, main)
            if device is not None:
                os.close(device)  # the child has it
            answer = pid
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        print(answer, flush=True)
    os._exit(0)  # the normal exit of a process with these imports takes seconds


def _child(request: Mapping[str, Any], main: Callable[[Sequence[str]], int]) -> None:
    code = 70
    try:
        if "terminal" in request:
            os.setsid()  # so that the terminal that is opened next is its own
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
            log = null = os.open(request["terminal"], os.O_RDWR)
        else:
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for name, value in request["limits"].items():
            number = getattr(resource, name)
            resource.setrlimit(number, (value, resource.getrlimit(number)[1]))
        place = request["place"] and Place(**request["place"])
        if place:
            _move(place)
        if place and place.program != "rlhf":
            _execute(place.program, request["run"])
            code = 0
        else:
            code = main(request["run"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _move(place: Place) -> None:
    import importlib

    root = str(Path(__file__).parent.parent)
    folders = filter(None, place.environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [place.folder, *folders, *(path for path in sys.path if path not in ("", root))]
    importlib.invalidate_caches()
    os.chdir(place.folder)
    os.environ.clear()
    os.environ.update(place.environment)


def _execute(program: str, words: Sequence[str]) -> None:
    """Run the program as ``__main__``. Raises SystemExit if the program does."""
    import runpy

    if program == "python":
        sys.argv = list(words)
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.argv = [program, *words]
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
