"""The server: checks requests, limits and counts them, and answers in JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rlhf_cli.serve_reward.access import PAGE, Access
from rlhf_cli.serve_reward.sample_groups import BadQuestion, Question, Unscored

_LOG = logging.getLogger(__name__)
PATH = "/get_reward"
RETRY_AFTER = "1"
"""Seconds after which a client may ask again."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
Answer = Callable[[Question], Awaitable[dict[str, Any]]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class RequestLimits:
    """``bytes`` of a request, number of unfinished ``samples``, ``seconds`` of a request, ``batch`` of samples that a
    model reads at once, and ``wait``, the seconds for which it waits for them."""

    bytes: int
    samples: int
    seconds: float
    batch: int
    wait: float


class _Refused(Exception):
    def __init__(self, status: int, cause: str, **headers: str) -> None:
        super().__init__(cause)
        self.status, self.headers = status, headers


class Metrics:
    """Has its own registry, so that the counts of several servers in one process are not added."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "rlhf_reward_requests", "Requests for rewards by HTTP status", ["status"], registry=self._registry
        )
        self.samples = Counter("rlhf_reward_samples", "Samples that got a reward", registry=self._registry)
        self.failures = Counter(
            "rlhf_reward_failed_samples", "Samples for which a reward failed", registry=self._registry
        )
        self.seconds = Histogram(
            "rlhf_reward_request_seconds", "Time of a request", buckets=SECONDS, registry=self._registry
        )
        self.under_way = Gauge("rlhf_reward_samples_under_way", "Samples being processed", registry=self._registry)
        self.passes = Histogram(
            "rlhf_reward_model_batch", "Samples that a model read at once", buckets=SAMPLES, registry=self._registry
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Application:
    """Answers requests after :attr:`answer` has been set."""

    def __init__(self, access: Access, limits: RequestLimits, metrics: Metrics) -> None:
        self._access, self._limits, self._metrics = access, limits, metrics
        self.answer: Answer | None = None
        self.stopping = False
        self.answering: set[Any] = set()
        """The connections with a request in progress."""
        self._under_way = 0
        self.web = web.Application(client_max_size=limits.bytes, middlewares=[self._middleware])
        self.web.add_routes(
            [web.post(PATH, self._get_reward), web.get("/health", self._health), web.get("/metrics", self._show)]
        )

    # ------------------------------------------------------------------------------------- requests

    async def _get_reward(self, request: web.Request) -> web.Response:
        self._authorise(request)
        if self.answer is None:
            raise _Refused(503, "the server is still loading", **{"Retry-After": RETRY_AFTER})
        if request.content_type != "application/json":
            raise _Refused(415, f"Content-Type is {request.content_type!r}; expected application/json")
        try:
            async with asyncio.timeout(self._limits.seconds):
                question = Question.read(await request.read())
                with self._admit(len(question)):
                    answer = await self.answer(question)
        except TimeoutError:
            raise _Refused(503, f"no result in {self._limits.seconds:g} s", **{"Retry-After": RETRY_AFTER}) from None
        self._metrics.samples.inc(len(question))
        return web.Response(body=json.dumps(answer, allow_nan=False).encode(), content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        if self.stopping:
            raise _Refused(503, "the server is stopping")
        if self.answer is None:
            raise _Refused(503, "the server is still loading")
        return web.json_response({"status": "ready"})

    async def _show(self, request: web.Request) -> web.Response:
        self._authorise(request)
        return web.Response(body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})

    # ------------------------------------------------------------------- errors, access and limits

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Converts every failure to JSON, and counts requests for rewards."""
        begin, status = time.perf_counter(), "gone"  # the client went away, which cancels the handler
        self.answering.add(request.protocol)
        try:
            response = await self._answered(request, handler)
            status = str(response.status)
            return response
        finally:
            self.answering.discard(request.protocol)
            if request.path == PATH:
                self._metrics.requests.labels(status).inc()
                self._metrics.seconds.observe(time.perf_counter() - begin)

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except _Refused as refused:
            return web.json_response({"error": str(refused)}, status=refused.status, headers=refused.headers)
        except BadQuestion as error:
            return web.json_response({"error": str(error)}, status=400)
        except Unscored as error:
            self._metrics.failures.inc(len(error.causes))
            causes = {str(n): cause for n, cause in error.causes.items()}
            return web.json_response({"error": str(error), "samples": causes}, status=422)
        except web.HTTPRequestEntityTooLarge:
            cause = f"the body is larger than {self._limits.bytes} bytes; send fewer samples at once"
            return web.json_response({"error": cause}, status=413)
        except web.HTTPException as error:  # no such path, another method
            cause = f"{error.reason}: {request.method} {request.path}; rewards are at POST {PATH}"
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return web.json_response({"error": cause}, status=error.status, headers=allow)
        except Exception as error:
            _LOG.exception("a request failed")
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)

    def _authorise(self, request: web.Request) -> None:
        if not self._access.allows(request.headers.get("Authorization")):
            cause = "the token is missing or wrong; send it as Authorization: Bearer TOKEN"
            raise _Refused(401, cause, **{"WWW-Authenticate": "Bearer"})
        if self._access.refuses_page(request.headers):
            raise _Refused(403, PAGE)

    @contextmanager
    def _admit(self, samples: int) -> Any:
        """Raises _Refused if these samples exceed the limit."""
        limit = self._limits.samples
        if samples > limit:
            raise _Refused(413, f"{samples} samples at once; the server takes at most {limit}. Send fewer at once.")
        if self._under_way + samples > limit:
            cause = f"{self._under_way} samples are being processed, and {samples} more exceed the limit of {limit}"
            raise _Refused(429, cause, **{"Retry-After": RETRY_AFTER})
        self._under_way += samples
        self._metrics.under_way.set(self._under_way)
        try:
            yield
        finally:
            self._under_way -= samples
            self._metrics.under_way.set(self._under_way)
