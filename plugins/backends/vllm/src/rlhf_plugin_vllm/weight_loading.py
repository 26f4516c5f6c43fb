"""The weights of an engine: loading and proving them, also during a pause, and moving them away in sleep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf.errors import ModelError, SyncError, WorkerError
from rlhf.interfaces import Generator, GeneratorSpec
from rlhf.interfaces.generator import Proof
from rlhf.weights.bucket import Bucket
from rlhf_transport.link import BucketHeader, Link
from rlhf_transport.receiving import ReceivesOverLinks

from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.engine.engine import Engine
from rlhf_plugin_vllm.requests import Sample

_WEIGHTS, _CACHE = "weights", "kv_cache"
_SHOWN = 8


class WeightLoading(ReceivesOverLinks, Generator):
    """The part of the generator that loads weights, pauses and sleeps. The subclass starts the engine and samples."""

    config: VllmGeneratorConfig
    spec: GeneratorSpec

    def __init__(self, engine: Engine, frees_memory: bool) -> None:
        """``frees_memory``: whether sleeping frees device memory."""
        self._engine: Engine | None = engine
        self._frees_memory = frees_memory
        self._asleep: set[str] = set()
        self._loading: int | None = None
        self._not_ready = "it has no weights yet"
        """Why nothing can be sampled now; empty if the generator is ready."""
        self._broken = ""
        """Why the engine cannot be used any more; empty if it can."""
        self._given_up = False
        self._live: dict[str, Sample] = {}
        """Unfinished samples by the engine's request names."""
        self._paused = False
        self._ahead: list[Any] = []
        """Outputs for unfinished samples that the engine returned while canaries were scored."""

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ModelError("the generator 'vllm' is closed")
        return self._engine

    # ------------------------------------------------------------------------------------- weights

    def begin_load(self, version: int) -> None:
        """Weights of ``version`` follow. Keys and values of the old weights are dropped, also those of paused samples.
        An unfinished load is abandoned.

        Raises ModelError while samples are being generated.
        """
        if self._broken:
            raise SyncError(f"the generator 'vllm' cannot load: {self._broken}")
        if self.engine.busy and not self._paused:
            raise ModelError("samples are being generated: exhaust or close generate() before begin_load(), or pause()")
        self._wake_parts(_WEIGHTS)
        self._not_ready = f"its weights of version {version} are not complete"
        self.engine.forget_prefixes(under_way=self._paused)
        self._call_workers("rlhf_begin")
        self._loading = version

    def receivers(self) -> int:
        return self.config.tensor_parallel * self.config.pipeline_parallel

    def connect(self, link: Link, first: int) -> None:
        self._call_workers("rlhf_connect", link, first)

    def take(self, bucket: Bucket | BucketHeader) -> None:
        if self._loading is None:
            raise SyncError("take() without begin_load()")
        self._call_workers("rlhf_take", bucket)

    def end_load(self) -> list[Proof]:
        if self._loading is None:
            raise SyncError("end_load() without begin_load()")
        version, self._loading = self._loading, None
        loaded = self._call_workers("rlhf_end")
        for who, told in loaded.items():
            if told.missing:
                raise SyncError(
                    f"{who} did not get all of version {version}: {_listed(told.missing)} did not arrive. Nothing is "
                    "sampled until a load is complete."
                )
        self.version, self._not_ready, self._given_up = version, "", False
        ended = {output.request_id for output in self._ahead if output.finished}
        waiting = [name for name in self._live if name not in ended]
        for name, drawn in zip(waiting, self.engine.drawn(waiting), strict=True):
            self._live[name].continue_with(version, drawn)
        dtype, detail = self.engine.dtype, self.engine.where.distribution
        return [Proof(version, who, told.nbytes, told.received, dtype, detail) for who, told in loaded.items()]

    def stale(self, bucket: Bucket | BucketHeader) -> list[str]:
        """Names of tensors that differ from what the kernels hold; empty if layers are split over workers."""
        return next(iter(self._call_workers("rlhf_differing", bucket).values()))

    def _call_workers(self, method: str, *arguments: Any) -> dict[str, Any]:
        """{worker: its answer}. Raises SyncError if a worker failed or did not answer in time. After a timeout the
        engine is not used again, because late answers could be taken for answers to later calls."""
        try:
            answers = self.engine.rpc(method, *arguments, timeout=self.spec.sync_timeout)
        except WorkerError:  # a worker is dead: a launcher with several engines replaces this one
            raise
        except Exception as error:
            self._broken = f"its workers did not answer {method}() ({type(error).__name__}: {error}); start another"
            raise SyncError(f"the generator 'vllm' cannot go on: {self._broken}") from error
        named = {"the engine" if len(answers) == 1 else f"engine worker {a.rank}": a for a in answers}
        for who, answer in named.items():
            if answer.error:
                raise SyncError(f"{who}: {answer.error}")
        return {who: answer.value for who, answer in named.items()}

    # --------------------------------------------------------------------------------------- pause

    def pause(self) -> None:
        """Unfinished samples keep their tokens. vLLM recomputes their keys and values with weights that are loaded
        meanwhile, so no key or value of old weights remains."""
        self._paused = True

    def resume(self) -> None:
        """Raises ModelError if a load is not complete; the generator then stays paused."""
        if self._not_ready:
            raise ModelError(f"the generator 'vllm' cannot resume: {self._not_ready}")
        self._paused = False

    def _check_resumed(self) -> None:
        if self._paused:
            raise ModelError("the generator 'vllm' is paused: resume() it first; its unfinished samples wait")

    # -------------------------------------------------------------------------------------- memory

    def sleep(self) -> None:
        """On a GPU weights and cache leave the device (``sleep_level``). On a CPU no memory is freed: cached keys and
        values are dropped, and nothing is sampled until :meth:`wake`, as on a GPU."""
        if self._asleep:
            return
        if self.engine.busy:
            raise ModelError("samples are being generated: exhaust or close generate() before sleep()")
        self.engine.forget_prefixes()
        if self._frees_memory:
            self.engine.sleep(self.config.sleep_level)
            if self.config.sleep_level == 2:
                self._given_up = True
                self._not_ready = "its weights were discarded while it slept (sleep_level = 2) and were not sent again"
        self._asleep = {_WEIGHTS, _CACHE}

    def wake(self) -> bool:
        self._wake_parts()
        return self._given_up

    def _wake_parts(self, *tags: str) -> None:
        """Wake the named parts, or all parts. A sync or a canary may come while the generator sleeps."""
        for tag in tags or (_WEIGHTS, _CACHE):
            if tag in self._asleep:
                if self._frees_memory:
                    self.engine.wake([tag])
                self._asleep.discard(tag)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
