"""Several engines behind one generator: requests go to engines by load, weights go to all engines."""

from __future__ import annotations

import asyncio
import heapq
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rlhf.errors import CapabilityError, WorkerError
from rlhf.interfaces import EnginePool, Generator, GeneratorSpec, Proof, Sleeps, TakesTensors
from rlhf.types import GenerationRequest, Image, Turn

from rlhf_workers.engines.pool import EngineWorkers
from rlhf_workers.engines.single_requests import EngineRequests
from rlhf_workers.engines.weight_link import WeightLink
from rlhf_workers.process.payload import pack

_LOOK_SECONDS = 1.0
"""Seconds between two checks for dead engines while samples are awaited."""
_NOBODY = Proof(0).receiver
"""``Proof.receiver`` of a generator that does not set it."""


class EngineGroup(Sleeps, EnginePool):
    """One generator for ``[placement.generator] ranks`` engines.

    An engine that dies is replaced and gets the current weights, and its unfinished requests are sampled again. The
    samples are the same, because they depend on the requests' seeds.
    """

    def __init__(
        self,
        generator: type[Generator],
        spec: GeneratorSpec,
        pool: EngineWorkers,
        link: WeightLink | None,
        refresh: Callable[[], object] | None,
    ) -> None:
        """
        Args:
            link: the link over which weights arrive; None: they arrive through the object store.
            refresh: sends the current weights again.
        """
        self.name, self.capabilities = generator.name, generator.capabilities  # type: ignore[misc]
        self.spec, self.pool = spec, pool
        self.link, self._send_again = link, refresh
        self._has_weights = self._asleep = False
        self._sleeps = issubclass(generator, Sleeps)
        self._reloads = 0
        self._proofs: list[Proof] = []
        self._single: EngineRequests | None = None
        """Calls the engines from the first :meth:`answer` on."""
        self._pauses, self._starting = 0, threading.Lock()
        """Number of unfinished pauses, and a lock for it and the start of ``_single``. The first request may arrive in
        another thread during a load."""

    # ---------------------------------------------------------------------------------- generation

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        self.pool.check_open()
        if self._single is not None:
            yield from self._generate_beside(requests, self._single)
            return
        pending = dict(enumerate(requests))
        while pending:
            self._replace_dead()
            order = list(pending)
            shares = assign_requests([pending[n] for n in order], len(self.pool.members))
            for position, turn in self._draw([pending[n] for n in order], shares):
                del pending[order[position]]
                yield order[position], turn

    def _draw(self, requests: Sequence[GenerationRequest], shares: list[list[int]]) -> Iterator[tuple[int, Turn]]:
        """Yield the engines' answers until every engine has ended or died."""
        pool, busy = self.pool, {n: share for n, share in enumerate(shares) if share}
        payload = pool.calls.send(pack([([requests[p] for p in share],) for share in busy.values()]))
        streams: dict[Any, tuple[int, set[int]]] = {}
        for rank, (number, share) in enumerate(busy.items()):
            stream = pool.members[number].items("generate", payload, rank)
            streams[stream] = number, set(range(len(share)))
        watchdog = pool.watch(busy, "generate()")
        while streams:
            for stream in watchdog.wait(list(streams)):
                number, open_ = streams[stream]
                chunk = next(stream, None)
                answer = None if chunk is None else pool.answer(number, "generate", chunk)
                if answer is None:  # it has ended, or died
                    if open_ and number not in pool.dead:
                        raise WorkerError(f"engine {number} ended without answering {len(open_)} requests")
                    del streams[stream]
                    watchdog.leave(pool.members[number])
                    continue
                for position, turn in answer:
                    if position not in open_:
                        raise WorkerError(
                            f"engine {number} answered request {position}, which it had already answered or never got"
                        )
                    open_.remove(position)
                    yield busy[number][position], turn

    def _generate_beside(
        self, requests: Sequence[GenerationRequest], single: EngineRequests
    ) -> Iterator[tuple[int, Turn]]:
        """Generate while single requests are under way."""
        finished: queue.SimpleQueue[tuple[int, Turn | Exception]] = queue.SimpleQueue()
        names = [single.submit(r, lambda turn, n=n: finished.put((n, turn))) for n, r in enumerate(requests)]  # type: ignore[misc]
        try:
            count = len(names)
            while count:
                try:
                    position, turn = finished.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    self.repair()
                    continue
                if isinstance(turn, Exception):
                    raise turn
                count -= 1
                yield position, turn
        finally:
            for name in names:
                single.cancel(name)

    async def answer(self, request: GenerationRequest) -> Turn:
        with self._starting:
            if self._single is None:
                single = EngineRequests(self.pool)
                for _ in range(self._pauses):
                    single.hold(drain=False)
                self._single = single
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[Turn] = loop.create_future()

        def settle(turn: Turn | Exception) -> None:
            if waiting.done():  # cancelled
                return
            if isinstance(turn, Exception):
                waiting.set_exception(turn)
            else:
                waiting.set_result(turn)

        def hand_over(turn: Turn | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(settle, turn)

        name = self._single.submit(request, hand_over)
        try:
            return await waiting
        finally:
            self._single.cancel(name)

    def idle(self) -> tuple[float, float] | None:
        return None if self._single is None else self._single.idle()

    def unfinished_tokens(self) -> int:
        return 0 if self._single is None else self._single.unfinished_tokens()

    def restarted(self) -> Mapping[str, int]:
        return {} if self._single is None else self._single.restarted()

    # ------------------------------------------------------------------------------------- weights

    def pause(self) -> None:
        with self._starting:
            self._pauses, single = self._pauses + 1, self._single
        if single is not None:
            single.hold(drain=self.spec.in_flight == "drain")

    def resume(self) -> None:
        with self._starting:
            self._pauses, single = self._pauses - 1, self._single
        if single is not None:
            single.release()

    def repair(self) -> None:
        if self.pool.dead:
            self.pause()
            self._replace_dead()
            self.resume()

    def begin_load(self, version: int) -> None:
        self._replace_dead(refresh=False)
        # An engine may die while the link connects. The link is built until all ends are alive.
        while self.link is not None and not self.link.fit:
            self.link.build(self.pool)
            self._replace_dead(refresh=False)
        # Set before the load is complete: an engine that dies during this load needs a refresh at its end.
        self._has_weights = True
        if self._single is not None and self.spec.in_flight == "restart":
            self._single.begin_again()
        self.pool.post("begin_load", version)  # while the policy makes the first bucket

    def take(self, bucket: Any) -> None:
        """``bucket``: an item of :meth:`RankGroup.send_buckets`, or a bucket."""
        if not self._cut_off:
            self.pool.ask("take", bucket, timeout=self.spec.sync_timeout)

    def end_load(self) -> list[Proof]:
        answers = {} if self._cut_off else self.pool.ask("end_load")
        if not self.pool.dead:
            self._proofs = [
                replace(proof, receiver=f"engine {n}" if proof.receiver == _NOBODY else f"engine {n}, {proof.receiver}")
                for n, proofs in answers.items()
                for proof in proofs
            ]
            self.version = self._proofs[0].version
            self._reloads += 1
            self.has_base = True
            return self._proofs
        self._replace_dead()  # sends the weights to all engines again; the new proofs count for this load too
        return self._proofs

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[list[float]]]:
        while True:
            self._replace_dead()
            answers = self.pool.ask("logprobs", sequences, *([images] if images else []))
            if not self.pool.dead:
                return [answer for per_engine in answers.values() for answer in per_engine]

    def stale(self, bucket: Any) -> list[str]:
        by_engine = {} if self._cut_off else self.pool.ask("stale", bucket)
        return list(dict.fromkeys(name for names in by_engine.values() for name in names))

    # -------------------------------------------------------------------------------------- memory

    def sleep(self) -> None:
        if self._sleeps:
            self.pool.ask("sleep")
            self._asleep = True

    def wake(self) -> bool:
        discarded = self._sleeps and any(self.pool.ask("wake").values())
        self.has_base = self.has_base and not discarded
        # If an engine is replaced here, its refresh has sent the weights to all engines.
        self._asleep, reloads = False, self._reloads
        self._replace_dead()
        return discarded and self._reloads == reloads

    def close(self) -> None:
        if self._single is not None:
            self._single.close()
        self.pool.close()

    # ------------------------------------------------------------------------------------ recovery

    def _replace_dead(self, refresh: bool = True) -> None:
        """Replace dead engines, and send the current weights if the engines had weights."""
        while replaced := self.pool.replace():
            self.has_base = False
            if self._single is not None:
                self._single.replaced(replaced)
            if self._asleep:
                self.pool.ask("sleep", engines=replaced)
            if refresh and self._has_weights and not self.pool.dead:
                self._refresh()

    @property
    def _cut_off(self) -> bool:
        """Whether an engine's death interrupted the link. All engines then get all weights again."""
        return self.link is not None and not self.link.fit and bool(self.pool.dead)

    def _refresh(self) -> None:
        if self._send_again is None:
            raise WorkerError(
                "an engine was replaced, but launch_generator() got no `refresh`, which would send it the "
                "current weights"
            )
        reloads = self._reloads
        self._send_again()
        if self._reloads == reloads:
            raise WorkerError("an engine was replaced and did not get the current weights")


def check_takes_tensors(generator: type[Generator], launcher: str) -> None:
    """Refuse generators that sample from a trainer's module, because engines of ``launcher`` run in separate
    processes."""
    if not issubclass(generator, TakesTensors):
        raise CapabilityError(
            f"generator {generator.name!r} samples from a trainer's module in the same process; launcher {launcher!r} "
            "runs engines in separate processes. Use a generator that takes tensors (--generator.use vllm), or "
            "launcher 'local'."
        )


def assign_requests(requests: Sequence[GenerationRequest], engines: int) -> list[list[int]]:
    """Assign requests to engines. Returns the positions in ``requests`` for each engine, in ascending order. The result
    depends only on the requests, so a run is reproducible.

    The load of all samples of one prompt is the prompt's length, counted once, plus ``max_new_tokens`` of each sample.
    They stay together, so that one engine computes the prompt, unless they exceed an engine's fair share. The heaviest
    groups are assigned first, each to the engine with the least load.

    Args:
        engines: >= 1.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for position, request in enumerate(requests):
        by_prompt.setdefault(request.context_key, []).append(position)
    groups = [(len(requests[members[0]].ids), members) for members in by_prompt.values()]
    load = [length + sum(requests[p].sampling.max_new_tokens for p in members) for length, members in groups]
    pieces, total = [], sum(load)
    for (length, members), weight in zip(groups, load, strict=True):
        parts = min(len(members), -(-weight * engines // total))
        for n in range(parts):
            piece = members[n * len(members) // parts : (n + 1) * len(members) // parts]
            # Negative loads: sorted() then begins with the heaviest piece. Equal ones are ordered by position.
            pieces.append((-length - sum(requests[p].sampling.max_new_tokens for p in piece), piece))
    shares: list[list[int]] = [[] for _ in range(engines)]
    loads = [(0, engine) for engine in range(engines)]
    for weight, piece in sorted(pieces):
        lightest, engine = heapq.heappop(loads)
        shares[engine] += piece
        heapq.heappush(loads, (lightest - weight, engine))
    return [sorted(share) for share in shares]
