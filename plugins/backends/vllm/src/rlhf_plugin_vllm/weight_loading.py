"""The weights of an engine: loading and proving them, also while samples are unfinished, and moving them away in
sleep."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlhf.errors import ModelError, SyncError, WorkerError, short_list
from rlhf.interfaces import AnswersRequests, Generator, GeneratorSpec, Sleeps
from rlhf.interfaces.generator import Proof
from rlhf.weights.bucket import Bucket
from rlhf_workers.links.link import BucketHeader, Link
from rlhf_workers.links.receiving import ReceivesOverLinks

from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.engine.engine import Engine
from rlhf_plugin_vllm.requests import VllmRequest

_WEIGHTS, _CACHE = "weights", "kv_cache"


class WeightLoading(ReceivesOverLinks, AnswersRequests, Sleeps, Generator):
    """The part of the generator that loads weights and sleeps. The subclass starts the engine and samples."""

    config: VllmGeneratorConfig
    spec: GeneratorSpec

    def __init__(self, engine: Engine, frees_memory: bool) -> None:
        """``frees_memory``: whether sleeping frees device memory."""
        self._engine: Engine | None = engine
        self._frees_memory = frees_memory
        self._asleep: set[str] = set()
        self._loading: int | None = None
        self._not_ready = "it has no weights yet"
        """Why sampling is not possible now; empty if the generator is ready."""
        self._broken = ""
        """Why the engine cannot be used any more; empty if it can."""
        self._given_up = False
        self._loads = 0
        """Number of loads that were started."""
        self._live: dict[str, VllmRequest] = {}
        """{the engine's request name: unfinished sample}."""
        self._generating = False
        """Whether an iterator of :meth:`generate` has started and not ended."""
        self._early_outputs: list[Any] = []
        """Outputs for unfinished samples that the engine returned while canaries were scored."""
        self._drafts = 0, 0
        """``Proof.drafts`` of the next load."""

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ModelError("the generator 'vllm' is closed")
        return self._engine

    # ------------------------------------------------------------------------------------- weights

    def begin_load(self, version: int) -> None:
        """Start loading the weights of ``version``. Keys and values of the old weights are dropped, and vLLM recomputes
        those of unfinished samples with the new weights. An unfinished load is abandoned.

        With ``GeneratorSpec.keys = "keep"`` unfinished samples keep their keys and values. Later requests still find no
        key of the old weights, because the salt of each request's cached prefixes is the number of earlier loads.

        Raises ModelError while :meth:`generate` is active.
        """
        if self._broken:
            raise SyncError(f"the generator 'vllm' cannot load: {self._broken}")
        if self._generating:
            raise ModelError("samples are being generated: exhaust or close generate() before begin_load()")
        # A load needs no cache, whose memory the roles may still use.
        self._wake_parts(_WEIGHTS)
        self._not_ready = f"its weights of version {version} are not complete"
        self._loads += 1
        if not (self._live and self.spec.keys == "keep"):
            self.engine.forget_prefixes(under_way=bool(self._live))
        self._call_workers("rlhf_begin", self.spec.adapters)
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
        results = self._call_workers("rlhf_end")
        for worker, result in results.items():
            if result.missing:
                raise SyncError(
                    f"{worker} did not receive all weights of version {version}: {short_list(result.missing, 8)} did "
                    "not arrive. Nothing is sampled until a load is complete."
                )
        self.version, self._not_ready, self._given_up = version, "", False
        self.has_base = True
        self._change_version(version)
        arithmetic = self.engine.dtype if self.config.quantization is None else "fp8"
        first, *other_proofs = [
            Proof(version, worker, result.nbytes, result.received, arithmetic, result.peak_memory)
            for worker, result in results.items()
        ]
        drafts, self._drafts = self._drafts, (0, 0)
        return [replace(first, drafts=drafts), *other_proofs]

    def stale(self, bucket: Bucket | BucketHeader) -> list[str]:
        """Names of tensors that differ from the kernels' tensors; empty if layers are split over workers."""
        return next(iter(self._call_workers("rlhf_differing", bucket).values()))

    def _call_workers(self, method: str, *arguments: Any) -> dict[str, Any]:
        """{worker: its answer}. Raises SyncError if a worker failed or did not answer in time. After a timeout the
        engine is not used again, because late answers could be taken for answers to later calls."""
        try:
            answers = self.engine.rpc(method, *arguments, timeout=self.spec.sync_timeout)
        except WorkerError:  # a worker is dead: a launcher with several engines replaces this one
            raise
        except Exception as error:
            self._broken = f"its workers did not answer {method}() ({type(error).__name__}: {error}); start another one"
            raise SyncError(f"the generator 'vllm' cannot continue: {self._broken}") from error
        by_worker = {"the engine" if len(answers) == 1 else f"engine worker {a.rank}": a for a in answers}
        for worker, answer in by_worker.items():
            if answer.error:
                raise SyncError(f"{worker}: {answer.error}")
        return {worker: answer.value for worker, answer in by_worker.items()}

    def _change_version(self, version: int) -> None:
        """Apply ``GeneratorSpec.in_flight`` to unfinished samples when the weights change."""
        waiting = self._unfinished()
        if self.spec.in_flight == "restart":
            self._early_outputs = [output for output in self._early_outputs if output.request_id not in waiting]
            self._restart(waiting)
            return
        for name, count in zip(waiting, self.engine.token_counts(waiting), strict=True):
            self._live[name].continue_with(version, count)

    def _unfinished(self) -> list[str]:
        """Samples that vLLM has not ended."""
        finished_ids = {output.request_id for output in self._early_outputs if output.finished}
        return [name for name in self._live if name not in finished_ids]

    @abstractmethod
    def _restart(self, names: Sequence[str]) -> None:
        """Sample these unfinished samples again from their first token."""

    # -------------------------------------------------------------------------------------- memory

    def sleep(self) -> None:
        """On a GPU that the run's roles share, move weights and cache off the device (``sleep_level``). Elsewhere no
        memory is freed. Cached keys and values are dropped, and nothing is sampled until :meth:`wake`."""
        if self._asleep:
            return
        if self._live:
            raise ModelError("samples are being generated: exhaust or close generate() before sleep()")
        self.engine.forget_prefixes()
        if self._frees_memory:
            self.engine.sleep(self.config.sleep_level)
            if self.config.sleep_level == 2:
                self._given_up, self.has_base = True, False
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
