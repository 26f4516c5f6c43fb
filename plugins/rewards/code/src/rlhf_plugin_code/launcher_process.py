"""The process that starts programs and exchanges data with them: ``python -m rlhf_plugin_code.launcher_process``.

It is separate from the process of the run, because starting programs from a process with many threads and much memory
is slow, and because this process can drop its capabilities. It reads and writes one JSON object per line:

* first ``{"sandbox", "command", "paths", "limits", "filter"}``,
* then ``{"id", "header", "input"}`` for each start, answered by ``{"id", "end", "code", "seconds", "out", "err"}``,
* ``{"cancel": id}`` ends a program; it is answered like any other.

``end`` is ``exit``, ``wall`` (time), ``output`` (too much), ``threads``, ``files`` (too many), ``cancelled`` or
``failed`` (the sandbox did not start; the cause is in ``err``). At the end of standard input all programs are killed.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rlhf_plugin_code.interpreter import Interpreter
from rlhf_plugin_code.limits import FILE_BYTES, LOOK_SECONDS, MIB, THREADS, ProgramLimits
from rlhf_plugin_code.starters import STARTERS, Started, drop_capabilities

ERRORS = 4096
"""Number of bytes that are kept from the end of standard error."""
CHUNK = 65536
END_SECONDS = 2.0
"""Time for the programs that are killed at the end to remove their folders."""


class SandboxProgram:
    """One start of a program. ``cancel`` may be called from another thread at any time."""

    def __init__(self, starter: Any, source: str, limits: ProgramLimits) -> None:
        self._starter, self._source, self._limits = starter, source, limits
        self._lock = threading.Lock()
        self._cancelled = False
        self._started: Started | None = None

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._started is not None:
                self._started.kill()

    def run(self, data: bytes) -> dict[str, Any]:
        begin = time.monotonic()
        try:
            started = self._starter.start(self._source)
        except Exception as error:
            return {"end": "failed", "code": 0, "seconds": 0.0, "out": "", "err": f"{type(error).__name__}: {error}"}
        with self._lock:
            self._started = started
            if self._cancelled:
                started.kill()
        try:
            end, out, err = self._talk(started, data, begin + self._limits.wall_seconds)
        finally:
            started.kill()
            code = started.wait()
            for stream in (started.stdin, started.stdout, started.stderr):
                stream.close()
        code = code if isinstance(code, int) else code.exit_code
        seconds = time.monotonic() - begin
        texts = {"out": out.decode(errors="replace"), "err": err.decode(errors="replace")}
        return {"end": "cancelled" if self._cancelled else end, "code": code, "seconds": seconds, **texts}

    def _talk(self, started: Started, data: bytes, deadline: float) -> tuple[str, bytearray, bytearray]:
        """(end, standard output, end of standard error) of a program that may still run."""
        out, err, position = bytearray(), bytearray(), 0
        exited, looked = os.pidfd_open(started.pid), time.monotonic()
        try:
            with selectors.DefaultSelector() as streams:
                for stream in (started.stdin, started.stdout, started.stderr):
                    # a write to a full pipe would wait for the program, also after its deadline
                    os.set_blocking(stream.fileno(), False)
                streams.register(started.stdin, selectors.EVENT_WRITE)
                streams.register(started.stdout, selectors.EVENT_READ, out)
                streams.register(started.stderr, selectors.EVENT_READ, err)
                streams.register(exited, selectors.EVENT_READ)
                while True:
                    left = deadline - time.monotonic()
                    ready = {key.fileobj for key, _ in streams.select(max(0.0, min(left, LOOK_SECONDS)))}
                    # only when no output is waiting, so that an answer that was written in time is read
                    if not ready and left <= 0:
                        return "wall", out, err
                    if time.monotonic() - looked >= LOOK_SECONDS:
                        if excess := self._excess(started.pid):
                            return excess, out, err
                        looked = time.monotonic()
                    if started.stdin in ready:
                        try:
                            position += os.write(started.stdin.fileno(), data[position : position + CHUNK])
                        except BrokenPipeError:
                            position = len(data)
                        if position == len(data):
                            streams.unregister(started.stdin)
                            started.stdin.close()
                    for stream, buffer in ((started.stdout, out), (started.stderr, err)):
                        # read all output that was written before the exit
                        while (stream in ready or exited in ready) and stream in streams.get_map():
                            try:
                                part = os.read(stream.fileno(), CHUNK)
                            except BlockingIOError:
                                break
                            buffer += part
                            if not part:
                                streams.unregister(stream)
                            if len(out) > self._limits.output:
                                return "output", out, err
                            del err[:-ERRORS]
                            if exited not in ready:
                                break
                    if exited in ready:
                        return "exit", out, err
        finally:
            os.close(exited)

    def _excess(self, pid: int) -> str:
        """The resource that the program exceeds (``threads`` or ``files``); empty if none.

        Args:
            pid: process id of the started process.
        """
        try:
            for _ in range(self._starter.parents):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                if not children:  # the sandbox is still starting
                    return ""
                pid = int(children[0])
            # the link count of a folder is 2 plus the number of its subfolders: here one for each thread
            if os.stat(f"/proc/{pid}/task").st_nlink - 2 > THREADS:
                return "threads"
            # other sandboxes have no folder of their own in memory: /tmp there holds files of others
            if self._starter.parents:
                folder = os.statvfs(f"/proc/{pid}/root/tmp")
                if (folder.f_files - folder.f_ffree) * FILE_BYTES > max(self._limits.disk, MIB):
                    return "files"
        except OSError:  # it has ended
            pass
        return ""


def main() -> None:
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    settings = json.loads(source.readline())
    limits = ProgramLimits(**settings["limits"])
    python = Interpreter(tuple(settings["command"]), tuple(settings["paths"]))
    if not STARTERS[settings["sandbox"]].drops_capabilities:
        drop_capabilities()
    starter = STARTERS[settings["sandbox"]](python, limits, bytes.fromhex(settings["filter"]))
    running: dict[int, SandboxProgram] = {}
    writing = threading.Lock()

    def serve(number: int, program: SandboxProgram, data: bytes) -> None:
        try:
            answer = program.run(data)
        except Exception as error:  # an error in this process must fail the sample, not lose the answer
            reason = f"{type(error).__name__}: {error}"
            answer = {"end": "failed", "code": 0, "seconds": 0.0, "out": "", "err": reason}
        running.pop(number, None)
        with writing:
            answers.write(json.dumps({"id": number, **answer}).encode() + b"\n")
            answers.flush()

    for line in source:
        request = json.loads(line)
        if "cancel" in request:
            program = running.get(request["cancel"])
            if program is not None:
                program.cancel()
            continue
        program = running[request["id"]] = SandboxProgram(starter, settings["inside"], limits)
        header = request["header"].encode()
        data = b"%d\n%s%s" % (len(header), header, request["input"].encode(errors="surrogatepass"))
        threading.Thread(target=serve, args=(request["id"], program, data), daemon=True).start()
    for program in list(running.values()):
        program.cancel()
    last = time.monotonic() + END_SECONDS
    while running and time.monotonic() < last:
        time.sleep(0.005)
    # a normal exit would flush standard output, and fail if one of the threads is just writing to it
    os._exit(0)


if __name__ == "__main__":
    main()
