"""Methods that this plugin adds to the workers of a vLLM *server*, which receives and returns JSON. Buckets are files.

The server is started with ``--worker-extension-cls rlhf_plugin_vllm.worker.served.ServedWeights``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlhf.weights.bucket import Bucket
from rlhf_engines.weight_files import PROTOCOL, digest, read_bucket
from torch import Tensor

from rlhf_plugin_vllm.worker.extension import WeightReceiver, WorkerAnswer, answered


class ServedWeights(WeightReceiver):
    """Methods for ``POST /collective_rpc``; ``self`` is a vLLM worker. Each returns :class:`WorkerAnswer` as a
    dictionary."""

    _rlhf_load = ""
    """Name of the load whose weights the worker has; empty if it has its initial weights."""
    _rlhf_held: dict[str, Tensor] | None = None
    """The tensors of the last load, in host memory, if differences from them may follow. Every sync loads them again.
    Parameters are split over workers and packed, so single elements of published tensors cannot be set in them."""

    def rlhf_facts(self: Any, path: str) -> dict[str, Any]:
        """Facts of the server that a generator needs, and the digest of the file at ``path``."""
        return asdict(_facts(self, path))

    def rlhf_start(self: Any, base: str | None) -> dict[str, Any]:
        """Start a load. Returns whether the worker holds the tensors of the load ``base``; None: it need not hold
        any."""
        holds = bool(base) and base == self._rlhf_load
        if not holds:
            self._rlhf_held = None if base is None else {}
        self._rlhf_load = ""
        return asdict(replace(self.rlhf_begin(None), value=holds))

    def rlhf_take_file(self: Any, path: str) -> dict[str, Any]:
        return asdict(self.rlhf_take((path, self._rlhf_held)))

    def rlhf_finish(self: Any, load: str) -> dict[str, Any]:
        """End a load; ``load`` is its name from now on."""
        answer = self.rlhf_end()
        if not answer.error and not answer.value.missing:
            self._rlhf_load = load
        return asdict(answer)

    def rlhf_differing_file(self: Any, path: str) -> dict[str, Any]:
        return asdict(self.rlhf_differing((path, None)))

    def rlhf_load_name(self: Any) -> dict[str, Any]:
        return asdict(WorkerAnswer(self.rank, self._rlhf_load))

    def _rlhf_open(self, message: Any) -> AbstractContextManager[Bucket]:
        path, base = message
        return nullcontext(read_bucket(Path(path), base))


@answered
def _facts(worker: Any, path: str) -> dict[str, Any]:
    config = worker.vllm_config
    model, parallel = config.model_config, config.parallel_config
    return {
        "protocol": PROTOCOL,
        "digest": digest(Path(path)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "formats": sorted({str(p.dtype).removeprefix("torch.") for p in worker.get_model().parameters()}),
        "length": model.max_model_len,
        "vocabulary": model.get_vocab_size(),
        "logprobs_mode": str(model.logprobs_mode),
        "quantization": model.quantization,
        "speculative": config.speculative_config is not None,
        "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
        "device": worker.device.type,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "data_parallel": parallel.data_parallel_size,
    }
