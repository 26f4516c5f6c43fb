"""The program of a worker process: calls Python functions, one at a time, as ``python -m
rlhf_plugin_tools.tool_process``. Requests and answers are JSON, one per line.

The first request is ``{"path": sys.path, "files": {path: text}, "functions": [[path, name], ...], "longest": N}``, its
answer ``{"ready": true}`` or ``{"broken": message}``. Every other one is ``{"name", "arguments"}``, its answer
``{"result": text}`` or ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import IO, Any

from rlhf.supervisor import ignore_stops

from rlhf_plugin_tools.tool import ToolError, as_text, raised


def main() -> None:
    ignore_stops()
    requests, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    # a function that reads standard input must not take the next request
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # prints of functions are not answers
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, lines), daemon=True).start()
    begin = json.loads(lines.get())
    sys.path[:] = begin["path"]
    functions: dict[str, Any] = {}
    try:
        from rlhf.plugins.files import SourceFile

        from rlhf_plugin_tools.functions import FunctionSource, PythonFunction

        files = {path: SourceFile.of(path, text) for path, text in begin["files"].items()}
        for path, name in begin["functions"]:
            functions[name] = PythonFunction(FunctionSource(files[path], name))
    except Exception as error:
        _send(answers, {"broken": f"{type(error).__name__}: {error}"})
        return
    _send(answers, {"ready": True})
    process_id = os.getpid()
    while True:
        request = json.loads(lines.get())
        answer = _answer(functions[request["name"]], request["arguments"], begin["longest"])
        if os.getpid() != process_id:  # a fork of the function returned here and must not answer
            os._exit(0)
        _send(answers, answer)


def _answer(function: Any, arguments: str, longest: int) -> dict[str, str]:
    try:
        return {"result": as_text(function.name, function.function(**function.validated(arguments)), longest)}
    except ToolError as error:
        return {"error": str(error)}
    except (Exception, SystemExit) as error:
        return {"error": str(raised(function.name, error))}


def _send(stream: IO[str], answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


def _read(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Pass requests on. The end of the stream means that the driver has ended: end this process, also during a call. On
    Linux the driver's supervisor ends it too, with its descendants."""
    for line in stream:
        lines.put(line)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
