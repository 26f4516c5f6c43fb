"""A resources server on this machine that answers as a test says. The session is a cookie."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http.cookies import SimpleCookie
from itertools import count
from typing import Any

from tests.support.loopback_server import Answer, LoopbackServer

Reply = tuple[int, bytes]
TOOLS = [{"type": "function", "name": name, "parameters": {}} for name in ("add", "get")]


def row(**columns: Any) -> dict[str, Any]:
    params = {"input": [{"role": "user", "content": "Count."}], "tools": TOOLS}
    return {"prompt": "Count.", "start": 1, "wanted": 3, "responses_create_params": params} | columns


class GymServer(LoopbackServer):
    """A counter per session. ``asked`` has (path, body). ``replies`` overrides answers by path; the status 0 closes the
    connection."""

    def __init__(self, **replies: Reply | Callable[[], Reply]) -> None:
        super().__init__()
        self.asked: list[tuple[str, Any]] = []
        self.replies = replies
        self.url = self.address
        self._counters: dict[str, int] = {}
        self._numbers = count()

    def answer(self, path: str, body: Any, headers: Mapping[str, str]) -> Answer | None:
        cookie = SimpleCookie(headers.get("Cookie", "")).get("session")
        session = cookie.value if cookie else str(next(self._numbers))
        path = path.strip("/")
        self.asked.append((path, body))
        status, content = self._reply(path, session, body)
        set_cookie = f"session={session}; path=/; httponly; samesite=lax"
        return None if status == 0 else (status, content, {"Set-Cookie": set_cookie})

    def _reply(self, path: str, session: str, body: Any) -> Reply:
        reply = self.replies.get(path)
        if reply is not None:
            return reply() if callable(reply) else reply
        if path == "seed_session":
            self._counters[session] = body["start"]
        elif path == "add":
            if not isinstance(body.get("count"), int):
                return 422, b'{"detail":"count: not an integer"}'
            self._counters[session] += body["count"]
        elif path == "verify":
            right = self._counters[session] == body["wanted"]
            return 200, json.dumps(body | {"reward": float(right), "count": self._counters[session]}).encode()
        elif path != "get":
            return 404, b'{"detail":"Not Found"}'
        return 200, json.dumps({"count": self._counters[session]}).encode()
