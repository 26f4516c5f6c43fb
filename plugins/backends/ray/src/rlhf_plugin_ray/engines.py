"""Several engines that look like one generator: requests by load, weights to all, the dead replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray
from rlhf.errors import CapabilityError, RolloutError, SyncError, WorkerError
from rlhf.interfaces import Generator, GeneratorSpec, Proof
from rlhf.types import GenerationRequest, Turn

from rlhf_plugin_ray.bridge import Bridge
from rlhf_plugin_ray.member import Member
from rlhf_plugin_ray.parcel import pack, send, unpack
from rlhf_plugin_ray.spread import spread
from rlhf_plugin_ray.trouble import Trouble, answer_of
from rlhf_plugin_ray.vigil import Vigil

_LOG = logging.getLogger(__name__)
_NOBODY = Proof(0).who
"""In a proof whose generator names nobody."""
_CLOSING = 5.0
"""Seconds for engines to close by themselves: one that is busy, or stalled, is not waited for longer."""
_LOADING = ("begin_load", "take", "end_load", "logprobs", "stale")


class EngineGroup(Generator):
    """The front of ``[placement.generator] ranks`` engines.

    An engine that dies (its process ends, or one of its methods raises WorkerError) is replaced, is given the weights
    of now, and what it had not finished is drawn again; samples being functions of the requests' seeds, they are the
    same.
    """

    def __init__(
        self,
        generator: type[Generator],
        spec: GeneratorSpec,
        start: Callable[[Sequence[int]], list[Member]],
        watch: Callable[[Sequence[Member], str], Vigil],
        engines: int,
        max_restarts: int,
    ) -> None:
        """``start`` makes the engines of these numbers, ready to be called."""
        self.name, self.capabilities = generator.name, generator.capabilities - {"accept:module"}  # type: ignore[misc]
        self.spec, self._start, self._watch = spec, start, watch
        self._restarts_left = self._max_restarts = max_restarts
        self.bridge: Bridge | None = None
        """The way of the weights, where they do not come through the object store."""
        self._dead: dict[int, str] = {}
        """Engines to replace, and how each died."""
        self._loaded = self._asleep = self._closed = False
        self._reloads = 0
        self._receivers: int | None = None
        self._proofs: list[Proof] = []
        self.engines = dict(enumerate(start(range(engines))))

    # ---------------------------------------------------------------------------------- generation

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        self._check_open()
        left = dict(enumerate(requests))
        while left:
            self._replace_dead()
            order = list(left)
            shares = spread([left[n] for n in order], len(self.engines))
            for position, turn in self._draw([left[n] for n in order], shares):
                del left[order[position]]
                yield order[position], turn

    def _draw(self, requests: Sequence[GenerationRequest], shares: list[list[int]]) -> Iterator[tuple[int, Turn]]:
        """What the engines answer, until each has ended or died."""
        busy = {n: share for n, share in enumerate(shares) if share}
        parcel = send(pack([([requests[p] for p in share],) for share in busy.values()]))
        streams: dict[Any, tuple[int, set[int]]] = {}
        for rank, (number, share) in enumerate(busy.items()):
            call = self.engines[number].handle.generate.options(num_returns="streaming")
            streams[call.remote(parcel, rank)] = number, set(range(len(share)))
        vigil = self._watch([self.engines[n] for n in busy], "generate()")
        while streams:
            for stream in vigil.wait(list(streams)):
                number, open_ = streams[stream]
                answer = self._answer(number, "generate", next(stream, None))
                if answer is None:  # it has ended, or died
                    if open_ and number not in self._dead:
                        raise WorkerError(f"engine {number} ended without an answer to {len(open_)} requests")
                    del streams[stream]
                    vigil.leave(self.engines[number])
                    continue
                for position, turn in answer:
                    if position not in open_:
                        raise WorkerError(f"engine {number} answered request {position} twice, or was not asked it")
                    open_.remove(position)
                    yield busy[number][position], turn

    # ------------------------------------------------------------------------------------- weights

    def begin_load(self, version: int) -> None:
        self._replace_dead(refresh=False)
        if self.bridge is not None and not self.bridge.fit:
            self.bridge.build()
        self._loaded = True
        self._everywhere("begin_load", version)

    def take(self, bucket: Any) -> None:
        """``bucket``: a reference that :meth:`RayGroup.stream` gave, or a bucket."""
        if not self._cut_off:
            self._everywhere("take", bucket)

    def end_load(self) -> list[Proof]:
        answers = {} if self._cut_off else self._everywhere("end_load")
        if not self._dead:
            self._proofs = [
                replace(proof, who=f"engine {n}" if proof.who == _NOBODY else f"engine {n}, {proof.who}")
                for n, proofs in answers.items()
                for proof in proofs
            ]
            self.version = self._proofs[0].version
            self._reloads += 1
            return self._proofs
        self._replace_dead()  # sends the weights to all once more; what it proved holds for this load too
        return self._proofs

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        while True:
            self._replace_dead()
            answers = self._everywhere("logprobs", sequences)
            if not self._dead:
                return [one for per_engine in answers.values() for one in per_engine]

    def stale(self, bucket: Any) -> list[str]:
        found = {} if self._cut_off else self._everywhere("stale", bucket)
        return list(dict.fromkeys(name for names in found.values() for name in names))

    # -------------------------------------------------------------------------------------- memory

    def sleep(self) -> None:
        self._everywhere("sleep")
        self._asleep = True

    def wake(self) -> None:
        self._everywhere("wake")
        self._asleep = False
        self._replace_dead()

    def receivers_of(self, engine: Member) -> int:
        """Processes of an engine that take weights."""
        if self._receivers is None:
            number = next(n for n, e in self.engines.items() if e is engine)
            answers = self._everywhere("receivers", only=[number])
            if number not in answers:
                raise WorkerError(self._dead[number])
            self._receivers = int(answers[number])
        return self._receivers

    def close(self) -> None:
        """Let the engines release what they hold, for a few seconds, and end their processes."""
        if not self._closed and ray.is_initialized():
            alive = [engine for n, engine in self.engines.items() if n not in self._dead]
            ray.wait([e.handle.call.remote("close", None, 0) for e in alive], num_returns=len(alive), timeout=_CLOSING)
        self._closed = True
        for engine in self.engines.values():
            engine.kill()

    # ------------------------------------------------------------------------------------ recovery

    def _replace_dead(self, refresh: bool = True) -> None:
        """Start engines in the place of those that died, with the weights of now where others have them."""
        while self._dead:
            dead = dict(sorted(self._dead.items()))
            self._restarts_left -= len(dead)
            if self._restarts_left < 0:
                raise WorkerError(
                    f"{'; '.join(dead.values())}\nThe run stops: {self._max_restarts} engines were replaced already "
                    "(launcher.max_restarts)"
                )
            for number, how in dead.items():
                _LOG.warning("%s\nIt is replaced; %d more may be", how, self._restarts_left)
                self.engines[number].kill()
            for number, engine in zip(dead, self._start(list(dead)), strict=True):
                self.engines[number] = engine
                del self._dead[number]
            if self._asleep:
                self._everywhere("sleep", only=dead)
            if refresh and self._loaded and not self._dead:
                self._refresh()

    @property
    def _cut_off(self) -> bool:
        """Whether an engine's death ended what was crossing the bridge: all engines get everything once more."""
        return self.bridge is not None and not self.bridge.fit and bool(self._dead)

    def _refresh(self) -> None:
        if self.refresh is None:
            raise WorkerError("an engine was replaced, and nobody is there to send it the weights of now")
        before = self._reloads
        self.refresh()
        if self._reloads == before:
            raise WorkerError("an engine was replaced and did not get the weights of now")

    # --------------------------------------------------------------------------------------- calls

    def _everywhere(self, method: str, *arguments: Any, only: Any = None) -> dict[int, Any]:
        """{engine: answer} of those that live to give one."""
        self._check_open()
        parcel = send(pack([arguments]))
        numbers = [n for n in (self.engines if only is None else only) if n not in self._dead]
        waiting = {self.engines[n].handle.call.remote(method, parcel, 0): n for n in numbers}
        vigil = self._watch([self.engines[n] for n in numbers], f"{method}()")
        answers: dict[int, Any] = {}
        failed: list[SyncError] = []
        while waiting:
            for ref in vigil.wait(list(waiting)):
                number = waiting.pop(ref)
                vigil.leave(self.engines[number])
                try:
                    answer = self._answer(number, method, ref)
                except SyncError as error:
                    if self.bridge is None:
                        raise
                    self.bridge.drop()  # ends the wait of the others, one of which may have died and be the cause
                    failed.append(error)
                    continue
                if number not in self._dead:
                    answers[number] = unpack(answer)[0]
        if failed and not self._dead:
            raise failed[0]
        return {n: answers[n] for n in numbers if n in answers}

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerError("the engines were shut down")

    def _answer(self, number: int, method: str, ref: Any) -> Any:
        """What came; None at a stream's end and where the engine died, which is noted."""
        if ref is None:
            return None
        answer = answer_of(self.engines[number], ref)
        if not isinstance(answer, Trouble):
            return answer
        error = answer.error(method, SyncError if method in _LOADING else RolloutError)
        if not isinstance(error, WorkerError):
            raise error
        self._dead[number] = str(error)
        if self.bridge is not None:
            self.bridge.drop()
        return None


def check_takes_tensors(generator: type[Generator]) -> None:
    """Engines live in processes of their own: no module of a trainer is there."""
    if "accept:tensors" not in generator.capabilities:
        raise CapabilityError(
            f"generator {generator.name!r} samples from a trainer's module in its own process; launcher 'ray' has "
            "engines in processes of their own. Use one that takes tensors (--generator.use vllm), or launcher 'local'."
        )
