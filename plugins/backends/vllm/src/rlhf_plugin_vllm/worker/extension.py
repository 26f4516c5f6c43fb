"""Methods that this plugin adds to each vLLM worker: receiving weights, and proving that they arrived.

vLLM adds the class to its worker by its name, so only names and buckets are sent to worker processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from rlhf.errors import RlhfError, SyncError
from rlhf.interfaces import LowRankAdapters
from rlhf.process_memory import peak_memory
from rlhf.weights.bucket import Bucket
from rlhf_workers.links.ends import connect_receiver
from rlhf_workers.links.link import BucketHeader, Link, Receiver
from vllm.config import set_current_vllm_config

from rlhf_plugin_vllm.versions import mend_drafts_on_a_cpu
from rlhf_plugin_vllm.worker.adapters import AdapterLoads
from rlhf_plugin_vllm.worker.readback import differing
from rlhf_plugin_vllm.worker.reload import Reload


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """The answer of one worker. Errors are returned, not raised. If one of several workers raises, vLLM does not read
    the answers of the others, and mistakes them for answers to the next call."""

    rank: int
    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A worker's result of a load."""

    received: dict[str, str] = field(default_factory=dict)
    """{name as the trainer sent it: fingerprint of the received bytes}."""
    nbytes: int = 0
    missing: tuple[str, ...] = ()
    """Names of tensors that the model needs and that did not arrive."""
    peak_memory: dict[str, int] = field(default_factory=dict)


def answered(method: Callable[..., Any]) -> Callable[..., WorkerAnswer]:
    """Run a method with vLLM's config and device set, and return its result or error as an :class:`WorkerAnswer`."""

    @wraps(method)
    def call(self: Any, *arguments: Any) -> WorkerAnswer:
        try:
            with set_current_vllm_config(self.vllm_config), self.device:
                return WorkerAnswer(self.rank, method(self, *arguments))
        except RlhfError as error:
            return WorkerAnswer(self.rank, error=str(error))
        except Exception as error:
            return WorkerAnswer(self.rank, error=f"{type(error).__name__}: {error}")

    return call


class WeightReceiver:
    """Methods for ``collective_rpc``; ``self`` is a vLLM worker."""

    _rlhf_reload: Reload | AdapterLoads | None = None
    _rlhf_adapters: AdapterLoads | None = None
    _rlhf_receiver: Receiver | None = None

    @answered
    def rlhf_prepare_drafts(self: Any) -> None:
        """On a CPU, before the first sample with speculative decoding: mend the sampler, and compile the lookup, which
        would cause a warning in a later step."""
        mend_drafts_on_a_cpu()
        batch = self.model_runner.input_batch
        with warnings.catch_warnings(action="ignore"):
            self.model_runner.drafter.propose(1, [[0]], batch.num_tokens_no_spec, batch.token_ids_cpu)

    @answered
    def rlhf_begin(self: Any, adapters: LowRankAdapters | None) -> None:
        """Start a load. An unfinished load is abandoned."""
        if self._rlhf_reload is not None:
            self._rlhf_reload.abandon()
        if adapters is None:
            self._rlhf_reload = Reload(self.get_model(), self.model_config)
            return
        if self._rlhf_adapters is None:
            has_whole_layers = self.parallel_config.world_size == 1
            self._rlhf_adapters = AdapterLoads(self.model_runner, self.model_config, adapters, has_whole_layers)
        self._rlhf_adapters.begin()
        self._rlhf_reload = self._rlhf_adapters

    @answered
    def rlhf_connect(self: Any, link: Link, first: int) -> None:
        """Prepare to receive headers of this link's buckets. ``first``: the number of the engine's first worker."""
        if self._rlhf_receiver is not None:
            self._rlhf_receiver.close()
        self._rlhf_receiver = connect_receiver(link, first + self.rank, self.device)

    @answered
    def rlhf_take(self: Any, message: Bucket | BucketHeader) -> None:
        if self._rlhf_reload is None:
            raise SyncError("weights arrived before begin_load()")
        with self._rlhf_open(message) as bucket:
            self._rlhf_reload.take(bucket)

    def _rlhf_open(self, message: Bucket | BucketHeader) -> AbstractContextManager[Bucket]:
        if isinstance(message, Bucket):
            return nullcontext(message)
        if self._rlhf_receiver is None:
            raise SyncError("a bucket's header arrived before connect()")
        return self._rlhf_receiver.open(message)

    @answered
    def rlhf_end(self: Any) -> LoadResult:
        reload, self._rlhf_reload = self._rlhf_reload, None
        if reload is None:
            raise SyncError("end_load() without begin_load()")
        missing = reload.end()
        return LoadResult(reload.received, reload.nbytes, tuple(missing), peak_memory())

    @answered
    def rlhf_differing(self: Any, message: Bucket | BucketHeader) -> list[str]:
        """See :func:`rlhf_plugin_vllm.worker.readback.differing`; an empty list if layers are split over workers."""
        with self._rlhf_open(message) as bucket:
            if self._rlhf_adapters is not None:
                return self._rlhf_adapters.differing(bucket)
            return differing(self.get_model(), bucket) if self.parallel_config.world_size == 1 else []
