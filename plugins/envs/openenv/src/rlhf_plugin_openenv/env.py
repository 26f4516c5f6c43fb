"""The environment: one connection per episode."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from pydantic import field_validator
from rlhf.errors import EnvError
from rlhf.interfaces import ComponentConfig, Env
from rlhf.types import EnvStep, Row
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from rlhf_plugin_openenv.socket_messages import InvalidAction, Observed, UnknownField, action_of, message, observed

LONGEST = 10 * 2**20
"""Largest size of an answer in bytes. A larger one is refused."""
GOODBYE = 5.0
"""Seconds that the server has to end a session after ``close``."""
SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}


class OpenEnvConfig(ComponentConfig):
    url: str
    """Address of the server, such as ``http://127.0.0.1:8000`` or ``wss://HOST``. ``/ws`` is added if it is missing."""
    action_field: str | None = None
    """Field of the environment's action that holds the policy's text. If absent, the policy writes the whole action as
    a JSON object."""
    observation_field: str | None = None
    """Field of the observation that the policy reads. If absent, it reads the whole observation as JSON."""
    reset: tuple[str, ...] = ()
    """Row columns that are sent with ``reset``, such as the number of a task. If ``seed`` is not among them, the
    sample's seed is sent."""
    invalid_reward: float = 0.0
    """Reward for a turn that is not an action of the environment. The policy gets a message that says what is wrong."""

    @field_validator("url")
    @classmethod
    def _web_socket(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of a server: write e.g. http://127.0.0.1:8000")
        path = parts.path.rstrip("/")
        path = path if path.endswith("/ws") else f"{path}/ws"
        return parts._replace(scheme=SCHEMES[parts.scheme], path=path).geturl()


class OpenEnv(Env):
    """Episodes on a server that was written with OpenEnv. Each episode has its own session on the server.

    The sample fails if the server cannot be reached, ends the connection, answers with an error, or violates its
    protocol.
    """

    name = "openenv"
    source = "OpenEnv 0.3.0, https://github.com/meta-pytorch/OpenEnv"
    Config = OpenEnvConfig
    layout = frozenset({"url"})

    _connection: ClientConnection | None = None
    _waits = False
    """Whether an answer is outstanding."""

    async def reset(self, row: Row, seed: int) -> str:
        c = self.config
        if missing := [name for name in c.reset if name not in row.columns]:
            raise EnvError(f"no column {missing[0]!r} (option `reset`); the row has {', '.join(row.columns) or 'none'}")
        data = {"seed": seed % 2**32} | {name: row[name] for name in c.reset}  # many generators take 32 bits
        request = message("reset", data)
        # the deadline of [env] limits each call; a server that computes a step for long answers no ping meanwhile
        with self._attributed("connecting"):
            self._connection = await connect(c.url, open_timeout=None, max_size=LONGEST, ping_interval=None)
        try:
            first = await self._ask("reset()", request)
        except InvalidAction as error:
            raise EnvError(f"{c.url} refused the reset: {error}") from None
        if first.done:
            raise EnvError(f"{c.url}: reset() was answered with done = true, so there is no episode")
        return first.text(c.observation_field)

    async def step(self, action: str) -> EnvStep:
        c = self.config
        try:
            step = await self._ask("step()", message("step", action_of(action, c.action_field)))
        except InvalidAction as error:
            return EnvStep(f"Invalid action: {error}", c.invalid_reward, info={"valid": False})
        except UnknownField as error:
            raise EnvError(
                f"{c.url}: the environment's action is not one text in the field {c.action_field!r} (action_field): "
                f"{error}. GET /schema of the server shows its fields."
            ) from None
        return EnvStep(step.text(c.observation_field), step.reward, step.done, info={"valid": True})

    async def close(self) -> None:
        """End the session. Waits until the server has ended it, so that a session is free for the next episode."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if not self._waits:  # while an answer is outstanding, the server does not read the message
                with contextlib.suppress(WebSocketException, OSError, TimeoutError):
                    async with asyncio.timeout(GOODBYE):
                        await connection.send(message("close"))
                        await connection.wait_closed()
        finally:
            # a server that is gone or busy would not answer the closing handshake
            connection.transport.abort()
            await connection.wait_closed()

    async def _ask(self, call: str, text: str) -> Observed:
        if self._connection is None:
            raise EnvError(f"{call} was called before reset()")
        self._waits = True
        with self._attributed(call):
            with contextlib.suppress(ConnectionClosed):  # the server's last messages say why it ended the connection
                await self._connection.send(text)
            answer = await self._connection.recv()
        self._waits = False
        try:
            return observed(answer, self.config.action_field)
        except EnvError as error:
            raise EnvError(f"{self.config.url}: {call}: {error}") from None

    @contextmanager
    def _attributed(self, call: str) -> Iterator[None]:
        try:
            yield
        except (WebSocketException, OSError) as error:
            raise EnvError(f"{self.config.url}: {call}: {error or type(error).__name__}") from error
