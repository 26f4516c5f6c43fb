"""The program of a worker process: ``python -P worker_program.py SOCKET``.

The first message is one line of JSON with the driver's import path. Before it is read, this file imports only the
standard library.
"""

from __future__ import annotations

import json
import socket
import sys


def main(number: int) -> None:
    end = socket.socket(fileno=number)
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = end.recv(1)  # only one byte, because the next messages start after the line
        if not byte:  # the driver has ended
            return
        line += byte
    start = json.loads(line)
    sys.path += [entry for entry in start["path"] if entry not in sys.path]

    from rlhf_plugin_processes.worker_loop import WorkerLoop

    WorkerLoop(end, start["name"], start["env"], start["devices"]).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
