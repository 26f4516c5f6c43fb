"""The generator ``vllm``: an engine in this process, its own copy of the weights, brought up to date and proven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

from rlhf.errors import ModelError, SyncError, WorkerError, boundary
from rlhf.interfaces import Generator, GeneratorSpec
from rlhf.interfaces.component import ComponentConfig
from rlhf.interfaces.generator import Proof
from rlhf.interfaces.memory import Footprint
from rlhf.requests import check_sampling
from rlhf.sync.bucket import Bucket
from rlhf.sync.link import Link, Shipment
from rlhf.types import GenerationRequest, Sampling, Turn

from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.engine import Engine, prefill_tokens
from rlhf_plugin_vllm.footprint import footprint
from rlhf_plugin_vllm.platforms import check as check_platform
from rlhf_plugin_vllm.platforms import platform
from rlhf_plugin_vllm.requests import LOWEST_TEMPERATURE, Sample, check, sampling_parameters, scoring_parameters

_WEIGHTS, _CACHE = "weights", "kv_cache"
_SHOWN = 8


class VllmGenerator(Generator):
    """Continuous batching by vLLM 0.32, in process: no server, no engine process, with or without Ray.

    Tokens go in and come out; text is what the run's decoder makes of them, and a stop string ends a turn with the
    token that completes it. Samples come out as they finish. Equal beginnings of prompts share keys and values. Every
    sample has its own seed. Log-probs are of the distribution drawn from, after temperature and truncation; temperature
    0 is greedy, its log-probs being those of temperature 1.

    Weights are loaded through vLLM's layerwise reload; each worker fingerprints what arrived before it is packed. A
    load that is not complete is an error, and nothing is sampled until one is.
    """

    name = "vllm"
    source = "vLLM: Kwon et al., SOSP 2023 (arXiv:2309.06180)"
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"accept:tensors", "accept:links", "logprobs", "seeds", "sleep", "top_p", "top_k", "min_p", "stop"}
    )
    Config = VllmGeneratorConfig
    lighter: ClassVar[tuple[Mapping[str, Any], ...]] = ({"max_sequences": 64}, {"eager": True})

    @classmethod
    def footprint(cls, config: Any, dtype: str, devices: int, device: str) -> Footprint:
        return footprint(config, dtype, device)

    @classmethod
    def check(cls, config: Any, spec: GeneratorSpec, samplings: Sequence[Sampling], device: str | None) -> None:
        for sampling in samplings:
            check_sampling(sampling, LOWEST_TEMPERATURE)
        if device is not None:
            where = platform()
            check_platform(config, where)
            prefill_tokens(config, spec, where)

    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None:
        self.config: VllmGeneratorConfig = self.Config() if config is None else config  # type: ignore[assignment]
        self.spec = spec
        where = platform()
        check_platform(self.config, where)
        self._gives_back = not where.cpu
        self._asleep: set[str] = set()
        self._loading: int | None = None
        self._unfit = "it has no weights yet"
        """Why nothing can be sampled now; empty: it can."""
        self._broken = ""
        """Why nothing can be asked of the engine any more."""
        self._given_up = False
        self._names = count()
        self._engine: Engine | None = Engine(self.config, spec, where)
        self.longest = min(spec.max_tokens, self.engine.length)
        """Tokens, prompt and answer together."""

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ModelError("the generator 'vllm' is closed")
        return self._engine

    # ------------------------------------------------------------------------------------ sampling

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        """See :class:`~rlhf.interfaces.Generator`. Requests are checked when this is called; closing the iterator early
        forgets those that are under way."""
        self._ready("sample")
        for i, request in enumerate(requests):
            check(i, request, self.engine.vocabulary, self.longest)
        return self._run(list(requests))

    def _run(self, requests: list[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        self._ready("sample", alone=True)
        live = {f"{next(self._names)}": Sample(i, r, self.spec.decode) for i, r in enumerate(requests)}
        try:
            for name, sample in live.items():
                parameters = sampling_parameters(sample.request, self.spec.eos_token_ids)
                self.engine.add(name, sample.request.ids, parameters)
            while live:
                yield from self._finished(live)
        finally:
            if self._engine is not None:
                self.engine.abort(list(live))

    def _finished(self, live: dict[str, Sample]) -> list[tuple[int, Turn]]:
        """One step of the engine; those of ``live`` that ended in it leave it."""
        turns = []
        for output in self._step():
            sample = live.get(output.request_id)
            ended = sample.take(output, self.version) if sample is not None else None
            if sample is None or ended is None:
                continue
            turn, early = ended
            if early:
                self.engine.abort([output.request_id])
            del live[output.request_id]
            turns.append((sample.position, turn))
        return turns

    def _step(self) -> list[Any]:
        if not self.engine.busy:
            raise ModelError("vLLM ended its work without answering all requests")
        with boundary(ModelError, "vLLM's engine"):
            return self.engine.step()

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        self._rouse(_WEIGHTS, _CACHE)
        self._ready("score", alone=True)
        found: dict[str, list[float]] = {}
        names = [f"{next(self._names)}" for _ in sequences]
        try:
            for name, ids in zip(names, sequences, strict=True):
                if len(ids) >= self.engine.length:
                    raise ModelError(
                        f"a sequence of {len(ids)} tokens cannot be scored, at most {self.engine.length - 1}"
                    )
                self.engine.add(name, ids, scoring_parameters())
            while len(found) < len(names):
                for output in self._step():
                    found[output.request_id] = list(output.prompt_logprobs.logprobs)
        finally:
            self.engine.abort([name for name in names if name not in found])
        return [[found[name] for name in names]]

    def _ready(self, to: str, alone: bool = False) -> None:
        self.engine.check_workers()
        why = self._broken or ("it is asleep; wake() it first" if self._asleep else self._unfit)
        if alone and not why and self.engine.busy:  # an output is handed to whoever takes the step
            why = "other samples are being drawn; exhaust or close that generate() first"
        if why:
            raise ModelError(f"the generator 'vllm' cannot {to}: {why}")

    # ------------------------------------------------------------------------------------- weights

    def begin_load(self, version: int) -> None:
        """Weights of ``version`` follow. Keys and values of the old ones are dropped; a load under way is given up.

        Raises ModelError while samples are being drawn.
        """
        if self._broken:
            raise SyncError(f"the generator 'vllm' cannot load: {self._broken}")
        if self.engine.busy:
            raise ModelError("samples are being drawn: exhaust or close generate() before begin_load()")
        self._rouse(_WEIGHTS)
        self._unfit = f"its weights of version {version} are not complete"
        self.engine.forget_prefixes()
        self._tell("rlhf_begin")
        self._loading = version

    def receivers(self) -> int:
        return self.config.tensor_parallel * self.config.pipeline_parallel

    def connect(self, link: Link, first: int) -> None:
        self._tell("rlhf_connect", link, first)

    def take(self, bucket: Bucket | Shipment) -> None:
        if self._loading is None:
            raise SyncError("take() without begin_load()")
        self._tell("rlhf_take", bucket)

    def end_load(self) -> list[Proof]:
        if self._loading is None:
            raise SyncError("end_load() without begin_load()")
        version, self._loading = self._loading, None
        loaded = self._tell("rlhf_end")
        for who, told in loaded.items():
            if told.missing:
                raise SyncError(
                    f"{who} did not get all of version {version}: {_listed(told.missing)} did not come. Nothing is "
                    "sampled until a load is complete."
                )
        self.version, self._unfit, self._given_up = version, "", False
        dtype, detail = self.engine.dtype, self.engine.where.distribution
        return [Proof(version, who, told.nbytes, told.received, dtype, detail) for who, told in loaded.items()]

    def stale(self, bucket: Bucket | Shipment) -> list[str]:
        """Read back from the kernels, exactly; nothing is known where layers are divided over workers."""
        return next(iter(self._tell("rlhf_differing", bucket).values()))

    def _tell(self, method: str, *arguments: Any) -> dict[str, Any]:
        """{worker: what it answers}. SyncError where one of them could not do it, or did not answer in time: then the
        engine is not used again, as later answers could not be told apart."""
        try:
            answers = self.engine.rpc(method, *arguments, timeout=self.spec.sync_timeout)
        except WorkerError:  # one of them is dead: whoever has engines replaces this one
            raise
        except Exception as error:
            self._broken = f"its workers did not answer {method}() ({type(error).__name__}: {error}); start another"
            raise SyncError(f"the generator 'vllm' cannot go on: {self._broken}") from error
        named = {"the engine" if len(answers) == 1 else f"engine worker {a.rank}": a for a in answers}
        for who, answer in named.items():
            if answer.error:
                raise SyncError(f"{who}: {answer.error}")
        return {who: answer.value for who, answer in named.items()}

    # -------------------------------------------------------------------------------------- memory

    def sleep(self) -> None:
        """On a GPU weights and cache leave the device (``sleep_level``). On a CPU there is nothing to give back: cached
        keys and values are dropped, and nothing is sampled until :meth:`wake`, as on a GPU."""
        if self._asleep:
            return
        if self.engine.busy:
            raise ModelError("samples are being drawn: exhaust or close generate() before sleep()")
        self.engine.forget_prefixes()
        if self._gives_back:
            self.engine.sleep(self.config.sleep_level)
            if self.config.sleep_level == 2:
                self._given_up = True
                self._unfit = "its weights were given up while it slept (sleep_level = 2) and did not come again"
        self._asleep = {_WEIGHTS, _CACHE}

    def wake(self) -> bool:
        """Weights that were given up are asked for again, here or by whoever is told that they have to come."""
        self._rouse(_WEIGHTS, _CACHE)
        if self._given_up and self.refresh is not None:
            self.refresh()
        return self._given_up

    def _rouse(self, *tags: str) -> None:
        """Bring back what a sync or a canary needs: they come between two phases, while the generator may sleep."""
        for tag in tags:
            if tag in self._asleep:
                if self._gives_back:
                    self.engine.wake([tag])
                self._asleep.discard(tag)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
