"""One vLLM engine whose core runs in this process: start, requests, steps, calls to its workers, stop."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from rlhf.errors import CapabilityError, ModelError, RlhfError
from rlhf.interfaces import GeneratorSpec
from rlhf.types import Image
from rlhf.types.arrays import IntArray
from rlhf_hub.processors import reads_images
from rlhf_hub.published import model_folder
from rlhf_modeling.precision import choose_precision

from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.cpu_models import check_cpu_model
from rlhf_plugin_vllm.engine.images import ImagePrompts
from rlhf_plugin_vllm.engine.isolation import (
    disable_small_compiles,
    isolated,
    preserved_random_state,
    skip_numa_binding,
)
from rlhf_plugin_vllm.engine.temporary_files import TemporaryFiles
from rlhf_plugin_vllm.engine.worker_processes import WorkerProcesses
from rlhf_plugin_vllm.memory import KV_CACHE_GIB, MEMORY_SHARE, PREFILL_TOKENS
from rlhf_plugin_vllm.platforms import BIND, Platform, thread_binding
from rlhf_plugin_vllm.processors import IMAGES, prepare

WORKER = "rlhf_plugin_vllm.worker.extension.WeightReceiver"
QUIET_WORKERS = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_running: dict[int, bool] = {}
"""{id of an engine of this process: whether torch.distributed was initialised by other code before the first engine}.
The engines of a process share vLLM's process groups."""
_left: list[TemporaryFiles] = []
"""Files of engines that were closed while other engines were running."""


class Engine:
    """A thin wrapper of vLLM's ``LLMEngine``."""

    def __init__(self, config: VllmGeneratorConfig, spec: GeneratorSpec, where: Platform) -> None:
        self.where = where
        self.images = spec.max_images
        """Most images of a request."""
        self.dtype = choose_precision(
            config.dtype if config.dtype != "auto" else spec.dtype, torch.device(where.device)
        ).name
        """``fp32`` | ``bf16``."""
        binding = thread_binding(config) if where.cpu else None
        apart = config.tensor_parallel * config.pipeline_parallel > 1
        self._files = TemporaryFiles(shared=not apart)
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **self._files.variables}
        if binding:
            variables |= {BIND: binding}
        if apart:
            variables |= QUIET_WORKERS
        if reads_images(spec.path):
            variables |= {IMAGES: "1"}
        foreign = any(_running.values()) if _running else torch.distributed.is_initialized()
        with isolated(variables):
            try:
                self._llm: Any = self._start(config, spec, where)
            except Exception as error:
                _take_down(foreign, self._files)
                if isinstance(error, RlhfError):
                    raise
                what = f"vLLM ({where.distribution}) could not start with {spec.path!r}"
                raise ModelError(f"{what}: {_first(error)}") from error
        _running[id(self)] = foreign
        self._files.note(self._llm.model_executor)
        self._workers = WorkerProcesses(self._llm.model_executor, after_death=self._files.remove)
        self._images = ImagePrompts(self._llm.renderer)
        model = self._llm.model_config
        self.length: int = model.max_model_len
        """Longest sequence in tokens, including the sampled ones."""
        self.vocabulary: int = model.get_vocab_size()
        """Token ids are below it."""

    def _start(self, config: VllmGeneratorConfig, spec: GeneratorSpec, where: Platform) -> Any:
        if where.cpu and config.eager is not False:
            disable_small_compiles()
        import vllm.envs
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        vllm.envs.disable_envs_cache()  # an earlier engine cached the environment of its start
        prepare()  # vLLM calls it for the first engine of a process only
        prepared = EngineArgs(**arguments(config, spec, where, self.dtype)).create_engine_config()
        if where.cpu:
            _check_cpu_model(prepared.model_config)
            skip_numa_binding()
        with self._files.in_use():
            return LLMEngine.from_vllm_config(prepared, disable_log_stats=True)

    # Every method that needs the worker processes raises WorkerError within seconds when one of them is dead.

    def check_workers(self) -> None:
        """Raises WorkerError if a worker has died."""
        self._workers.check()

    # ------------------------------------------------------------------------------------ requests

    def add(
        self,
        name: str,
        ids: IntArray,
        parameters: Any,
        salt: str | None = None,
        images: Sequence[Image] = (),
        weights: str = "",
    ) -> None:
        """Queue a request; its output carries ``name``. It shares cached keys and values with requests of the same
        ``salt`` only, and cached features of images with requests of the same ``weights`` only."""
        from vllm.inputs.engine import tokens_input

        prompt = self._images.prompt(ids, images, weights, salt) if images else tokens_input(list(ids), cache_salt=salt)
        with self._workers.needed():  # the first request makes vLLM ask its workers for their capabilities
            self._llm.add_request(name, prompt, parameters)

    def step(self) -> list[Any]:
        """Run one scheduler step; returns vLLM's outputs."""
        with preserved_random_state(), self._workers.needed():
            return self._llm.step()

    def abort(self, names: Sequence[str]) -> None:
        """Drop requests."""
        if names:
            self._llm.abort_request(list(names))

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return self._llm.has_unfinished_requests()

    # ------------------------------------------------------------------------------------- workers

    def rpc(self, method: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Call a method of :class:`~rlhf_plugin_vllm.worker.extension.WeightReceiver` on every worker."""
        with self._workers.needed():
            return self._llm.collective_rpc(method, timeout=timeout, args=arguments)

    def drawn(self, names: Sequence[str]) -> list[int]:
        """Number of tokens sampled so far, of unfinished requests."""
        scheduled, own = self._llm.engine_core.engine_core.scheduler.requests, self._llm.output_processor
        return [scheduled[own.external_req_ids[name][0]].num_output_tokens for name in names]

    def forget_prefixes(self, under_way: bool = False) -> None:
        """Drop cached keys, values and features of images. With ``under_way`` also those of unfinished requests; vLLM
        recomputes them."""
        if not self._llm.reset_prefix_cache(under_way):
            raise ModelError("vLLM keeps keys and values of old weights: there are unfinished requests")
        if self.images:
            with self._workers.needed():
                self._llm.reset_encoder_cache()

    def sleep(self, level: int) -> None:
        with self._workers.needed():
            self._llm.sleep(level)

    def wake(self, tags: Sequence[str]) -> None:
        with self._workers.needed():
            self._llm.wake_up(list(tags))

    def close(self) -> None:
        """Stop the workers and release everything. The last engine of the process ends vLLM's process groups, unless
        other code initialised them."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        from vllm.v1.engine import core

        self._workers.end()
        foreign = _running.pop(id(self))
        original, core.cleanup_dist_env_and_memory = core.cleanup_dist_env_and_memory, lambda shutdown_ray=False: None
        try:
            llm.engine_core.shutdown()
        finally:
            core.cleanup_dist_env_and_memory = original
        del llm
        gc.collect()
        _take_down(foreign, self._files)


def _take_down(foreign: bool, scratch: TemporaryFiles) -> None:
    """After the last engine: end vLLM's process groups, and remove the files of all engines."""
    if scratch.shared:
        _left.append(scratch)
    else:
        scratch.remove()
    if _running:
        return
    if not foreign and torch.distributed.is_initialized():
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
    while _left:
        _left.pop().remove()


def arguments(config: VllmGeneratorConfig, spec: GeneratorSpec, where: Platform, dtype: str) -> dict[str, Any]:
    """Arguments for vLLM's ``EngineArgs``. vLLM gets no tokenizer: the run encodes and decodes text. Only processors of
    images need one."""
    length, tokens = prefill_tokens(config, spec, where)
    chosen: dict[str, Any] = {
        "model": model_folder(spec.path, weights=True, code=spec.trust_remote_code),
        "skip_tokenizer_init": spec.max_images == 0,
        "limit_mm_per_prompt": {"image": spec.max_images, "video": 0, "audio": 0},
        "mm_processor_cache_gb": 0,  # the pixels of an image are kept by ImagePrompts
        "skip_mm_profiling": where.cpu,  # the size of the cache is given, so that nothing has to be measured
        "trust_remote_code": spec.trust_remote_code,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "seed": spec.seed % 2**32,
        "max_model_len": length,
        "max_num_seqs": config.max_sequences,
        "max_num_batched_tokens": tokens,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        "enforce_eager": where.cpu if config.eager is None else config.eager,
        "enable_prefix_caching": config.prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": WORKER,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    space = config.kv_cache_gib if config.kv_cache_gib is not None or not where.cpu else KV_CACHE_GIB
    if space is not None:
        chosen["kv_cache_memory_bytes"] = int(space * 2**30)
    if where.cpu:
        # For a seeded prompt in two chunks vLLM reads the offset of the generator. A CPU generator has none: the engine
        # would die.
        chosen["enable_chunked_prefill"] = False
    else:
        if config.chunked_prefill is not None:
            chosen["enable_chunked_prefill"] = config.chunked_prefill
        chosen["gpu_memory_utilization"] = config.memory_share or MEMORY_SHARE
        chosen["enable_sleep_mode"] = True
    if config.tensor_parallel * config.pipeline_parallel > 1:
        chosen["distributed_executor_backend"] = "mp"
    return chosen


def prefill_tokens(config: VllmGeneratorConfig, spec: GeneratorSpec, where: Platform) -> tuple[int, int]:
    """(longest sequence, tokens of one forward pass). Raises CapabilityError if a prompt would have to be split
    that is not: on a CPU, and without ``chunked_prefill``."""
    length = _length(spec)
    tokens = config.max_batched_tokens or max(PREFILL_TOKENS, length, config.max_sequences)
    if (where.cpu or config.chunked_prefill is False) and tokens < length:
        why = "on a CPU prompts are not split" if where.cpu else "chunked_prefill = false splits no prompt"
        raise CapabilityError(
            f"max_batched_tokens = {tokens} does not hold a sequence of {length} tokens (data.max_tokens + 1), and "
            f"{why}. Raise it, or leave it out."
        )
    return length, tokens


def _length(spec: GeneratorSpec) -> int:
    """The run's longest sequence plus one token, so that a sequence of full length can be scored. At most the model's
    positions, unless the model scales its positions."""
    config = text_config(spec)
    positions = getattr(config, "max_position_embeddings", None)
    stretched = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
    wanted = spec.max_tokens + 1
    return wanted if positions is None or stretched else min(wanted, positions)


def text_config(spec: GeneratorSpec) -> Any:
    """The transformers config of the model's text part."""
    from transformers import AutoConfig

    place = model_folder(spec.path, code=spec.trust_remote_code)
    return AutoConfig.from_pretrained(place, trust_remote_code=spec.trust_remote_code).get_text_config()


def _check_cpu_model(model: Any) -> None:
    """Refuse models that vLLM's CPU kernels compute wrongly or not at all.

    Args:
        model: vLLM's ``ModelConfig``.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size = None if model.use_mla else model.get_head_size()
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    check_cpu_model(model.model, size, sizes, model.get_num_experts())


def _first(error: BaseException) -> str:
    """The message of the first cause, at most 2000 characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return text if len(text) < 2000 else text[:2000] + " ..."
