"""A server on this machine that answers as a test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.loopback_server import Answer, LoopbackServer

Reply = tuple[int, bytes]


def lengths(question: dict[str, Any]) -> Reply:
    """The reward is the length of the query."""
    return 200, json.dumps({"rewards": [len(text) for text in question["query"]]}).encode()


class RewardServer(LoopbackServer):
    """``asked`` has the questions so far. ``reply`` makes an answer of a question."""

    def __init__(self, reply: Callable[[dict[str, Any]], Reply] = lengths) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.reply = reply
        self.encoding: str | None = None
        """The header Content-Encoding of its answers."""
        self.url = f"{self.address}/get_reward"

    def answer(self, path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        self.asked.append(body)
        self.headers.append(dict(headers))
        status, content = self.reply(body)
        fields = {"Location": "/elsewhere"} if status == 302 else {}
        return status, content, fields if self.encoding is None else {**fields, "Content-Encoding": self.encoding}
