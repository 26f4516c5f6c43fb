"""A server on this machine that answers as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes]


def lengths(question: dict[str, Any]) -> Reply:
    """The reward is the length of the query."""
    return 200, json.dumps({"rewards": [len(text) for text in question["query"]]}).encode()


class RewardServer:
    """``asked`` has the questions so far. ``reply`` makes an answer of a question."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply] = lengths) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.reply = reply
        self.leave = threading.Event()
        """A reply may wait for the end of the test."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append(question)
                server.headers.append(dict(self.headers))
                status, body = server.reply(question)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/get_reward"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> RewardServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave.set()
        self._server.shutdown()
        self._server.server_close()
