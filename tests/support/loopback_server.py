"""A server on this machine's loopback interface. What it answers to the JSON of a POST is written by its subclasses."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Answer = tuple[int, bytes, Mapping[str, str]]
"""Status, body, headers."""


class LoopbackServer:
    """A context; it serves inside its ``with`` block."""

    def __init__(self) -> None:
        self.leave = threading.Event()
        """An answer may wait for the end of the test."""
        loopback = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = loopback.answer(self.path, body, self.headers)
                if answer is None:
                    self.close_connection = True
                    return
                status, content, headers = answer
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                if not isinstance(sys.exception(), ConnectionError):  # a client that left is no error
                    super().handle_error(request, client_address)

        self._server = Server(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def answer(self, path: str, body: Any, headers: Mapping[str, str]) -> Answer | None:
        """The answer to a request; None closes the connection without one."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
