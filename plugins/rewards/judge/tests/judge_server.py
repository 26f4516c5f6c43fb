"""A server on this machine with the form of OpenAI's chat completions. A test says what the judge replies."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.support.loopback_server import Answer, LoopbackServer

Reply = str | Answer
"""The judge's text, or the whole answer."""


def answers_in(request: dict[str, Any]) -> list[str]:
    """The texts between the marks in the user's message."""
    matches = re.findall(r"<(answer-[0-9a-f]{16})>\n(.*?)\n</\1>", request["messages"][1]["content"], re.DOTALL)
    return [text for _, text in matches]


def by_length(request: dict[str, Any]) -> str:
    """The score is the number of characters, at most 10; the longer answer wins."""
    lengths = [len(text) for text in answers_in(request)]
    if len(lengths) == 2:
        a, b = lengths
        return json.dumps({"reason": "length", "winner": "tie" if a == b else "A" if a > b else "B"})
    names = re.findall(r"^- (\w+): ", request["messages"][1]["content"], re.MULTILINE)
    return json.dumps({"reason": "length", "scores": {name: max(1, min(10, lengths[0])) for name in names}})


class JudgeServer(LoopbackServer):
    """``asked`` has the bodies of requests, ``most`` the largest number under way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.reply: Callable[[dict[str, Any]], Reply] = by_length
        self.usage: dict[str, int] | None = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        self.hold = 0.0
        """Seconds before each answer."""
        self.most = 0
        self._now, self._lock = 0, threading.Lock()
        self.url = f"{self.address}/v1"

    def answer(self, path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        if path != "/v1/chat/completions":
            return 404, json.dumps({"error": {"message": f"no {path}"}}).encode(), {}
        with self._lock:
            self.asked.append(body)
            self.headers.append(dict(headers))
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self.hold)
        reply = self.reply(body)
        with self._lock:
            self._now -= 1
        if not isinstance(reply, str):
            return reply
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        content = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        content |= {"choices": [choice]} | ({} if self.usage is None else {"usage": self.usage})
        return 200, json.dumps(content).encode(), {"Content-Type": "application/json"}
