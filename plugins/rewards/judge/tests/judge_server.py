"""A server on this machine with the form of OpenAI's chat completions. A test says what the judge replies."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = str | tuple[int, bytes, dict[str, str]]
"""The judge's text, or the whole answer: status, body, headers."""


def answers_in(asked: dict[str, Any]) -> list[str]:
    """The texts between the marks in the user's message."""
    found = re.findall(r"<(answer-[0-9a-f]{16})>\n(.*?)\n</\1>", asked["messages"][1]["content"], re.DOTALL)
    return [text for _, text in found]


def by_length(asked: dict[str, Any]) -> str:
    """The score is the number of characters, at most 10; the longer answer wins."""
    lengths = [len(text) for text in answers_in(asked)]
    if len(lengths) == 2:
        a, b = lengths
        return json.dumps({"reason": "length", "winner": "tie" if a == b else "A" if a > b else "B"})
    names = re.findall(r"^- (\w+): ", asked["messages"][1]["content"], re.MULTILINE)
    return json.dumps({"reason": "length", "scores": {name: max(1, min(10, lengths[0])) for name in names}})


class JudgeServer:
    """``asked`` has the bodies of requests, ``most`` the largest number under way at once."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.reply: Callable[[dict[str, Any]], Reply] = by_length
        self.usage: dict[str, int] | None = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        self.hold = 0.0
        """Seconds before each answer."""
        self.leave = threading.Event()
        """A reply may wait for the end of the test."""
        self.most = 0
        self._now, self._lock = 0, threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, body, headers = server.answer(self.path, asked, dict(self.headers))
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """A client that left is no error."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def answer(self, path: str, asked: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        if path != "/v1/chat/completions":
            return 404, json.dumps({"error": {"message": f"no {path}"}}).encode(), {}
        with self._lock:
            self.asked.append(asked)
            self.headers.append(headers)
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self.hold)
        reply = self.reply(asked)
        with self._lock:
            self._now -= 1
        if not isinstance(reply, str):
            return reply
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": asked["model"]}
        body |= {"choices": [choice]} | ({} if self.usage is None else {"usage": self.usage})
        return 200, json.dumps(body).encode(), {"Content-Type": "application/json"}

    def __enter__(self) -> JudgeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.leave.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
