"""A server of rewards in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import httpx
from rlhf.plugins import Plugins
from rlhf_cli.serve_reward.access import Access
from rlhf_cli.serve_reward.application import RequestLimits
from rlhf_cli.serve_reward.serving import serve
from rlhf_runtime.config.load import load
from rlhf_runtime.loop.signals import StopRequest

DEFAULTS = {"bytes": 2**20, "samples": 4096, "seconds": 60.0, "batch": 256, "wait": 0.005}


class Served:
    """``stop`` asks for the end; ``ended`` is set then."""

    def __init__(self, url: str, stop: StopRequest, ended: Future[None]) -> None:
        self.url, self.stop, self.ended = url, stop, ended
        self.base = url.removesuffix("/get_reward")

    def ask(self, query: Sequence[str], prompts: Sequence[str] | None = None, **fields: Any) -> httpx.Response:
        """Without prompts: the whole query is the answer."""
        headers = fields.pop("headers", None)
        body = {"query": query, "prompts": [""] * len(query) if prompts is None else prompts, **fields}
        return httpx.post(self.url, json=body, headers=headers, timeout=60)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.base + path, **options)

    def counts(self) -> dict[str, float]:
        """The metrics."""
        lines = (line.rsplit(" ", 1) for line in self.get("/metrics").text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}


@contextlib.contextmanager
def serving(
    *flags: tuple[str, str],
    token: str | None = None,
    access: Access | None = None,
    label: str | None = None,
    port: int = 0,
    **limits: Any,
) -> Iterator[Served]:
    """Args:
    flags: of the run file, such as ``("reward", "math")``.
    """
    config = load(None, [("algorithm.use", "score"), *flags])
    ready: Future[str] = Future()
    completion: Future[None] = Future()
    stop = StopRequest()

    def run() -> None:
        try:
            allowed, limit = access or Access("127.0.0.1", port, token), RequestLimits(**(DEFAULTS | limits))
            serve(config, Plugins.discover(), allowed, limit, label, announce=ready.set_result, stop=stop)
            completion.set_result(None)
        except BaseException as error:
            (completion if ready.done() else ready).set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    message = ready.result(60)
    try:
        yield Served(message.rpartition(" at ")[2], stop, completion)
    finally:
        stop.request("the end of the test")
        thread.join(60)
    assert not thread.is_alive()
    completion.result(0)
