"""A resources server on this machine that answers as a test says. The session is a cookie."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

Reply = tuple[int, bytes]
TOOLS = [{"type": "function", "name": name, "parameters": {}} for name in ("add", "get")]


def row(**columns: Any) -> dict[str, Any]:
    params = {"input": [{"role": "user", "content": "Count."}], "tools": TOOLS}
    return {"prompt": "Count.", "start": 1, "wanted": 3, "responses_create_params": params} | columns


class GymServer:
    """A counter per session. ``asked`` has (path, body). ``replies`` overrides answers by path."""

    def __init__(self, **replies: Reply | Callable[[], Reply]) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.replies = replies
        self.leave = threading.Event()
        counters: dict[str, int] = {}
        numbers = count()
        server = self

        def answer(path: str, session: str, body: Any) -> Reply:
            reply = server.replies.get(path)
            if reply is not None:
                return reply() if callable(reply) else reply
            if path == "seed_session":
                counters[session] = body["start"]
            elif path == "add":
                if not isinstance(body.get("count"), int):
                    return 422, b'{"detail":"count: not an integer"}'
                counters[session] += body["count"]
            elif path == "verify":
                right = counters[session] == body["wanted"]
                return 200, json.dumps(body | {"reward": float(right), "count": counters[session]}).encode()
            elif path != "get":
                return 404, b'{"detail":"Not Found"}'
            return 200, json.dumps({"count": counters[session]}).encode()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                cookie = SimpleCookie(self.headers.get("Cookie", "")).get("session")
                session = cookie.value if cookie else str(next(numbers))
                path = self.path.strip("/")
                server.asked.append((path, body))
                status, said = answer(path, session, body)
                if status == 0:  # the server dies
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Set-Cookie", f"session={session}; path=/; httponly; samesite=lax")
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> GymServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave.set()
        self._server.shutdown()
        self._server.server_close()
