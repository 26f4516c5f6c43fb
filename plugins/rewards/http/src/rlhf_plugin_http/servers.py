"""Several servers that give the same answers: which one is asked next, and which are left out for a while."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count


class Servers:
    """Args:
    urls: at least one.
    rest: seconds that a server is left out after it failed.
    """

    def __init__(self, urls: Sequence[str], rest: float) -> None:
        self._urls, self._rest = list(urls), rest
        self._until = dict.fromkeys(self._urls, 0.0)
        """{URL: time until which it is left out}."""
        self._turn = count()

    def order(self) -> Iterator[str]:
        """The servers to ask for one request, the first first. Requests begin at the servers in turn. Servers that are
        left out come last, the one that failed first before the others."""
        n = next(self._turn) % len(self._urls)
        turned = [*self._urls[n:], *self._urls[:n]]
        now = time.monotonic()
        yield from sorted(turned, key=lambda url: max(0.0, self._until[url] - now))

    def failed(self, url: str) -> bool:
        """Leave a server out. Returns whether it was not left out already."""
        now = time.monotonic()
        fresh = self._until[url] <= now
        self._until[url] = now + self._rest
        return fresh

    def answered(self, url: str) -> None:
        """Ask the server again in its turn."""
        self._until[url] = 0.0
