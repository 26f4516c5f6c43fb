"""The connections of the server: how many there may be, how long one may be idle, and requests that are not HTTP."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Collection
from typing import Any

from aiohttp import web

_LOG = logging.getLogger(__name__)
IDLE = 15.0
"""Seconds that a connection has to send the headers of a request."""
MOST = 1024
"""Most connections, as far as the limit on open files allows."""


def largest_number() -> int:
    """How many connections the server holds at once. Each is an open file; the rest is for the rewards."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if files == resource.RLIM_INFINITY else max(16, min(MOST, files // 4))


class Connections:
    """Makes the protocol of each new connection. A connection over the limit takes the place of the one that has been
    open longest without a request under way, so clients without a token cannot keep others out.

    Args:
        server: of aiohttp's runner.
        answering: the connections whose requests are under way.
    """

    def __init__(self, server: web.Server, answering: Collection[Any], limit: int) -> None:
        self._server, self._answering, self._limit = server, answering, limit
        self._open: dict[Connection, None] = {}

    def __call__(self) -> Connection:
        loop = asyncio.get_running_loop()
        return Connection(self, self._server, loop=loop, access_log=None, keepalive_timeout=IDLE)

    def opened(self, connection: Connection) -> None:
        self._open[connection] = None
        if len(self._open) > self._limit:
            idle = next(each for each in self._open if each is connection or each not in self._answering)
            del self._open[idle]
            idle.force_close()

    def lost(self, connection: Connection) -> None:
        self._open.pop(connection, None)


class Connection(web.RequestHandler):
    """One connection."""

    def __init__(self, connections: Connections, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.lost(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """aiohttp would answer and log the line that it cannot read, which may be the one with the token."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        _LOG.debug("a request of %s is not HTTP: %s", request.remote, type(exc).__name__)
        response = web.json_response({"error": "the request is not valid HTTP"}, status=status)
        response.force_close()
        return response
