"""Several engines that look like one generator: requests by load, weights to all, the dead replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlhf.errors import CapabilityError, WorkerError
from rlhf.interfaces import Generator, GeneratorSpec, Proof
from rlhf.types import GenerationRequest, Turn

from rlhf_plugin_ray.actor.payload import pack, send
from rlhf_plugin_ray.engines.load_balance import assign_requests
from rlhf_plugin_ray.engines.pool import EnginePool
from rlhf_plugin_ray.engines.weight_link import WeightLink

_NOBODY = Proof(0).who
"""In a proof whose generator names nobody."""


class EngineGroup(Generator):
    """The front of ``[placement.generator] ranks`` engines.

    An engine that dies is replaced, is given the weights of now, and what it had not finished is drawn again; samples
    being functions of the requests' seeds, they are the same.
    """

    def __init__(self, generator: type[Generator], spec: GeneratorSpec, pool: EnginePool) -> None:
        self.name, self.capabilities = generator.name, generator.capabilities - {"accept:module", "pause"}  # type: ignore[misc]
        self.spec, self.pool = spec, pool
        self.weight_link: WeightLink | None = None
        """The way of the weights, where they do not come through the object store."""
        self._loaded = self._asleep = False
        self._reloads = 0
        self._proofs: list[Proof] = []

    # ---------------------------------------------------------------------------------- generation

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        self.pool.check_open()
        left = dict(enumerate(requests))
        while left:
            self._replace_dead()
            order = list(left)
            shares = assign_requests([left[n] for n in order], len(self.pool.members))
            for position, turn in self._draw([left[n] for n in order], shares):
                del left[order[position]]
                yield order[position], turn

    def _draw(self, requests: Sequence[GenerationRequest], shares: list[list[int]]) -> Iterator[tuple[int, Turn]]:
        """What the engines answer, until each has ended or died."""
        pool, busy = self.pool, {n: share for n, share in enumerate(shares) if share}
        payload = send(pack([([requests[p] for p in share],) for share in busy.values()]))
        streams: dict[Any, tuple[int, set[int]]] = {}
        for rank, (number, share) in enumerate(busy.items()):
            call = pool.members[number].handle.generate.options(num_returns="streaming")
            streams[call.remote(payload, rank)] = number, set(range(len(share)))
        watchdog = pool.watch(busy, "generate()")
        while streams:
            for stream in watchdog.wait(list(streams)):
                number, open_ = streams[stream]
                chunk = next(stream, None)
                answer = None if chunk is None else pool.answer(number, "generate", chunk)
                if answer is None:  # it has ended, or died
                    if open_ and number not in pool.dead:
                        raise WorkerError(f"engine {number} ended without an answer to {len(open_)} requests")
                    del streams[stream]
                    watchdog.leave(pool.members[number])
                    continue
                for position, turn in answer:
                    if position not in open_:
                        raise WorkerError(f"engine {number} answered request {position} twice, or was not asked it")
                    open_.remove(position)
                    yield busy[number][position], turn

    # ------------------------------------------------------------------------------------- weights

    def begin_load(self, version: int) -> None:
        self._replace_dead(refresh=False)
        while self.weight_link is not None and not self.weight_link.fit:
            self.weight_link.build()
            self._replace_dead(refresh=False)
        self._loaded = True
        self.pool.post("begin_load", version)  # while the policy makes the first bucket

    def take(self, bucket: Any) -> None:
        """``bucket``: a reference that :meth:`RayGroup.stream` gave, or a bucket."""
        if not self._cut_off:
            self.pool.ask("take", bucket, timeout=self.spec.sync_timeout)

    def end_load(self) -> list[Proof]:
        answers = {} if self._cut_off else self.pool.ask("end_load")
        if not self.pool.dead:
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
            answers = self.pool.ask("logprobs", sequences)
            if not self.pool.dead:
                return [one for per_engine in answers.values() for one in per_engine]

    def stale(self, bucket: Any) -> list[str]:
        found = {} if self._cut_off else self.pool.ask("stale", bucket)
        return list(dict.fromkeys(name for names in found.values() for name in names))

    # -------------------------------------------------------------------------------------- memory

    def sleep(self) -> None:
        self.pool.ask("sleep")
        self._asleep = True

    def wake(self) -> None:
        bare = any(self.pool.ask("wake").values())
        self._asleep, before = False, self._reloads
        self._replace_dead()
        if bare and self._reloads == before:  # engines are elsewhere: they cannot ask for weights by themselves
            self._refresh()

    def close(self) -> None:
        self.pool.close()

    # ------------------------------------------------------------------------------------ recovery

    def _replace_dead(self, refresh: bool = True) -> None:
        """Start engines in the place of those that died, with the weights of now where others have them."""
        while replaced := self.pool.replace():
            if self._asleep:
                self.pool.ask("sleep", only=replaced)
            if refresh and self._loaded and not self.pool.dead:
                self._refresh()

    @property
    def _cut_off(self) -> bool:
        """Whether an engine's death ended what was crossing the weight_link: all engines get everything once more."""
        return self.weight_link is not None and not self.weight_link.fit and bool(self.pool.dead)

    def _refresh(self) -> None:
        if self.refresh is None:
            raise WorkerError("an engine was replaced, and nobody is there to send it the weights of now")
        before = self._reloads
        self.refresh()
        if self._reloads == before:
            raise WorkerError("an engine was replaced and did not get the weights of now")


def check_takes_tensors(generator: type[Generator]) -> None:
    """Engines live in processes of their own: no module of a trainer is there."""
    if "accept:tensors" not in generator.capabilities:
        raise CapabilityError(
            f"generator {generator.name!r} samples from a trainer's module in its own process; launcher 'ray' has "
            "engines in processes of their own. Use one that takes tensors (--generator.use vllm), or launcher 'local'."
        )
