"""A server on this machine that answers messages of the protocol as a test says."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

Reply = Callable[[dict[str, Any]], Any]


def observation(reward: Any = None, done: Any = False, **fields: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": fields, "reward": reward, "done": done}}


def dice() -> Reply:
    """An environment: guess a number that the seed hides. Made anew for each session."""
    hidden = 0

    def reply(request: dict[str, Any]) -> Any:
        nonlocal hidden
        if request["type"] == "reset":
            hidden = random.Random(request["data"]["seed"]).randint(1, 6)
            return observation(text="Guess 1 to 6.")
        right = request["data"].get("guess") == str(hidden)
        return observation(float(right), right, text="yes" if right else "no")

    return reply


class OpenEnvServer:
    """``asked`` has the messages so far. A reply that is not an object is sent as it is; None ends the
    connection. The messages of a list are sent one after another before the connection ends."""

    def __init__(self, reply: Callable[[], Reply] = dice) -> None:
        self.asked: list[dict[str, Any]] = []
        self._reply = reply
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._ready, self._end = threading.Event(), asyncio.Event()

    async def _serve(self) -> None:
        async with serve(self._session, "127.0.0.1", 0, close_timeout=0.1) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._ready.set()
            await self._end.wait()

    async def _session(self, connection: ServerConnection) -> None:
        reply = self._reply()
        async for text in connection:
            request = json.loads(text)
            self.asked.append(request)
            if request["type"] == "close":
                return
            answer = reply(request)
            if answer is None:
                connection.transport.abort()
                return
            if isinstance(answer, list):
                for message in answer:
                    await connection.send(json.dumps(message))
                return
            if answer is ...:  # no answer at all
                continue
            await connection.send(json.dumps(answer) if isinstance(answer, dict) else answer)

    def __enter__(self) -> OpenEnvServer:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        self._loop.close()
