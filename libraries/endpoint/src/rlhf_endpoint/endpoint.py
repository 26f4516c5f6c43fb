"""The HTTP server: finds the sample and the API of a request, and writes errors in the form of the API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from rlhf_endpoint import chat_api, messages_api, responses_api
from rlhf_endpoint.chat_request import ApiError
from rlhf_endpoint.config import ProgramConfig
from rlhf_endpoint.session import Session

LARGEST = 10 * 2**20
"""Maximum number of bytes of a request. Larger requests are refused."""
ENDED_LIMIT = 1000
"""Maximum number of remembered keys of ended samples. A continuous stream always has active samples, so without a limit
the keys of a whole run would be kept."""
_APIS = {"chat/completions": chat_api, "responses": responses_api, "messages": messages_api}


class Endpoint:
    """A server on 127.0.0.1 for all active samples. It starts with the first sample and stops after the last one.

    The key of a sample is its API key and the first part of its path. A request that names another key is refused.
    """

    def __init__(self, config: ProgramConfig) -> None:
        self._config = config
        self._sessions: dict[str, Session] = {}
        """{key: session} of the active samples."""
        self._ended_keys: deque[str] = deque(maxlen=ENDED_LIMIT)
        """Keys of the most recently ended samples."""
        self._users = 0
        self._started: asyncio.Future[tuple[web.AppRunner, int]] | None = None

    @contextlib.asynccontextmanager
    async def serve(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """(base URL, key) of a sample."""
        key = secrets.token_urlsafe(24)
        self._users += 1
        try:
            if self._started is None:
                self._started = asyncio.ensure_future(self._start())
            # If this sample is cancelled, the other samples still need the server.
            _, port = await asyncio.shield(self._started)
            self._sessions[key] = session
            yield f"http://127.0.0.1:{port}/{key}/v1", key
        finally:
            self._users -= 1
            if self._sessions.pop(key, None) is not None:
                self._ended_keys.append(key)
            if not self._users and self._started is not None:
                started, self._started = self._started, None
                self._ended_keys.clear()
                runner, _ = await started
                await runner.cleanup()

    async def _start(self) -> tuple[web.AppRunner, int]:
        app = web.Application(client_max_size=LARGEST)
        for prefix in ("", "/{key}"):
            for name in _APIS:
                app.router.add_post(f"{prefix}/v1/{name}", self._api(name))
            app.router.add_get(f"{prefix}/v1/models", self._models)
        app.router.add_route("*", "/{rest:.*}", self._unknown)
        # By default aiohttp waits up to 60 s for requests that are still open. The samples have ended.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        return runner, runner.addresses[0][1]

    def _api(self, name: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        api = _APIS[name]

        def refused(error: ApiError) -> web.Response:
            return (
                _refused(error)
                if api is not messages_api
                else web.json_response(messages_api.error_body(error), status=error.status)
            )

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session(request)
                raw = await request.read()
                body = _parsed(raw)
                chat_request = api.read(body, self._config, session)

                async def work() -> Any:
                    choices = await session.answer(chat_request)
                    return choices, secrets.token_hex(12), int(time.time())

                key, count = request.headers.get("Idempotency-Key"), request.headers.get("x-stainless-retry-count", "0")
                choices, number, time_s = await session.run_once(key, count != "0", name.encode() + raw, work)
                session.answers[number] = choices[0].message
                if not chat_request.stream:
                    return web.json_response(api.answer(chat_request, choices, body, number, time_s))
                return await _streamed(request, api.chunks(chat_request, choices, body, number, time_s), name)
            except ApiError as error:
                return refused(error)
            except web.HTTPRequestEntityTooLarge:
                message = f"the request has more than {LARGEST // 2**20} MiB"
                return refused(ApiError(413, message, code="request_too_large"))
            except (ConnectionResetError, asyncio.CancelledError):  # the client has disconnected
                raise
            except Exception as error:  # the sample is over; its cause is reported there
                return refused(ApiError(500, f"the sample failed: {type(error).__name__}", code="sample_failed"))

        return handle

    def _session(self, request: web.Request) -> Session:
        path = request.match_info.get("key")
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        key = credentials.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", path)
        if key in self._ended_keys and path in (None, key):
            raise ApiError(410, "the sample of this API key has ended", code="sample_ended")
        if not key or key not in self._sessions or path not in (None, key):
            raise ApiError(401, "the API key does not belong to a sample", code="invalid_api_key")
        return self._sessions[key]

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._session(request)
        except ApiError as error:
            return _refused(error)
        models = [{"id": m, "object": "model", "created": 0, "owned_by": "rlhf"} for m in self._config.models]
        return web.json_response({"object": "list", "data": models})

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        paths = ", ".join(f"POST /v1/{name}" for name in _APIS)
        message = f"{request.method} is not supported for this path; supported: {paths} and GET /v1/models"
        return _refused(ApiError(404, message, code="unknown_url"))


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def _refused(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status)


async def _streamed(request: web.Request, events: Any, name: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    lines = []
    for event in events:
        kind = f"event: {event['type']}\n" if "type" in event else ""
        lines.append(f"{kind}data: {json.dumps(event)}\n\n")
    if name == "chat/completions":
        lines.append("data: [DONE]\n\n")
    with contextlib.suppress(ConnectionResetError):  # the client has disconnected; its answer is kept
        await response.prepare(request)
        await response.write("".join(lines).encode())
        await response.write_eof()
    return response
