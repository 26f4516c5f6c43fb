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
from rlhf_modeling.precision import choose_precision

from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.cpu_models import check_cpu_model
from rlhf_plugin_vllm.engine.adapters import adapter_request
from rlhf_plugin_vllm.engine.arguments import arguments
from rlhf_plugin_vllm.engine.global_state import (
    disable_small_compiles,
    engine_state,
    isolated,
    preserved_random_state,
    skip_numa_binding,
    use_exact_products,
)
from rlhf_plugin_vllm.engine.images import ImagePrompts
from rlhf_plugin_vllm.engine.speculative import start_numba
from rlhf_plugin_vllm.engine.temporary_files import TemporaryFiles
from rlhf_plugin_vllm.engine.worker_processes import WorkerProcesses
from rlhf_plugin_vllm.platforms import BIND, Platform, thread_binding
from rlhf_plugin_vllm.processors import IMAGES, prepare
from rlhf_plugin_vllm.versions import (
    keep_pixels_of_cached_images,
    keep_seeds_on_a_cpu,
    keeping_process_groups,
    meeting_at,
    start_beside_numba,
)

QUIET_WORKERS = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_running: dict[int, bool] = {}
"""{id of an engine of this process: whether torch.distributed was initialised by other code before the first engine}.
The engines of a process share vLLM's process groups."""
_sleeping: set[int] = set()
"""Ids of engines that compute in this process and can sleep."""
_left: list[TemporaryFiles] = []
"""Files of engines that were closed while other engines were running."""


class Engine:
    """A thin wrapper of vLLM's ``LLMEngine``."""

    def __init__(self, config: VllmGeneratorConfig, spec: GeneratorSpec, platform: Platform) -> None:
        self.platform = platform
        self.images = spec.max_images
        """Maximum number of images per request."""
        self.dtype = engine_precision(config, spec, platform)
        """``fp32`` | ``bf16``."""
        binding = thread_binding(config) if platform.cpu else None
        has_workers = config.tensor_parallel * config.pipeline_parallel > 1
        sleeps = spec.shares_devices and not platform.cpu and not has_workers
        if sleeps and _sleeping:
            raise CapabilityError(
                "an engine of this process already shares its devices with roles, and vLLM's sleep allocator "
                "serves one engine per process. Close that engine first, or start engines in separate processes "
                "(launchers 'processes' and 'ray')."
            )
        self._files = TemporaryFiles(shared=not has_workers)
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **self._files.variables}
        if binding:
            variables |= {BIND: binding}
        if has_workers:
            variables |= QUIET_WORKERS
        if reads_images(spec.path):
            variables |= {IMAGES: "1"}
        foreign = any(_running.values()) if _running else torch.distributed.is_initialized()
        with isolated(variables):
            try:
                self._llm: Any = self._start(config, spec, platform)
            except Exception as error:
                _take_down(foreign, self._files)
                if isinstance(error, RlhfError):
                    raise
                failure = f"vLLM ({platform.distribution}) could not start with {spec.path!r}"
                remedy = " If LoRA is unsupported, set sync.adapters = 'merged'." if spec.adapters is not None else ""
                raise ModelError(f"{failure}: {_first(error)}{remedy}") from error
        _running[id(self)] = foreign
        if sleeps:
            _sleeping.add(id(self))
        self._files.note(self._llm.model_executor)
        self._workers = WorkerProcesses(self._llm.model_executor, after_death=self._files.remove)
        self._images = ImagePrompts(self._llm.renderer)
        self._adapter = adapter_request() if spec.adapters is not None else None
        model = self._llm.model_config
        self.length: int = model.max_model_len
        """Number of tokens of the longest sequence, including sampled ones."""
        self.vocabulary: int = model.get_vocab_size()
        """Size of the vocabulary. Token ids are below it."""

    def _start(self, config: VllmGeneratorConfig, spec: GeneratorSpec, platform: Platform) -> Any:
        if platform.cpu and config.eager is not False:
            disable_small_compiles()
        if not platform.cpu and self.dtype == "fp32":
            use_exact_products()
        import vllm.envs
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        vllm.envs.disable_envs_cache()  # an earlier engine cached the environment of its start
        prepare()  # vLLM calls it only for the first engine of a process
        if config.speculative is not None:
            start_numba()
        prepared = EngineArgs(**arguments(config, spec, platform, self.dtype)).create_engine_config()
        keep_pixels_of_cached_images()
        if platform.cpu:
            keep_seeds_on_a_cpu()
            start_beside_numba()
            _check_cpu_model(prepared.model_config)
            skip_numa_binding()
        with meeting_at(self._files.folder / self._files.meeting):
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
        base: bool = False,
    ) -> None:
        """Queue a request; its output carries ``name``. It shares cached keys and values only with requests of the same
        ``salt``, and cached features of images only with requests of the same ``weights``. With ``base`` it is computed
        without the adapter; vLLM shares no keys and values between the two."""
        from vllm.inputs.engine import tokens_input

        prompt = self._images.prompt(ids, images, weights, salt) if images else tokens_input(list(ids), cache_salt=salt)
        with self._workers.needed():  # the first request makes vLLM ask its workers for their capabilities
            self._llm.add_request(name, prompt, parameters, lora_request=None if base else self._adapter)

    def step(self) -> list[Any]:
        """Run one scheduler step; returns vLLM's outputs."""
        with engine_state(), preserved_random_state(), self._workers.needed():
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
        with engine_state(), self._workers.needed():
            return self._llm.collective_rpc(method, timeout=timeout, args=arguments)

    def token_counts(self, names: Sequence[str]) -> list[int]:
        """Number of tokens sampled so far for unfinished requests."""
        scheduled, processor = self._llm.engine_core.engine_core.scheduler.requests, self._llm.output_processor
        return [scheduled[processor.external_req_ids[name][0]].num_output_tokens for name in names]

    def forget_prefixes(self, under_way: bool = False) -> None:
        """Drop cached keys, values and features of images. With ``under_way`` also those of unfinished requests, which
        vLLM recomputes."""
        if not self._llm.reset_prefix_cache(under_way):
            raise ModelError("vLLM keeps keys and values of old weights: there are unfinished requests")
        if self.images:
            with self._workers.needed():
                self._llm.reset_encoder_cache()

    def sleep(self, level: int) -> None:
        with engine_state(), self._workers.needed():
            self._llm.sleep(level)

    def wake(self, tags: Sequence[str]) -> None:
        with engine_state(), self._workers.needed():
            self._llm.wake_up(list(tags))

    def close(self) -> None:
        """Stop the workers and release everything. The last engine of the process ends vLLM's process groups, unless
        other code initialised them."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        # vLLM itself would wait longer for workers that do not end.
        self._workers.end()
        foreign = _running.pop(id(self))
        _sleeping.discard(id(self))
        with keeping_process_groups():
            llm.engine_core.shutdown()
        del llm
        gc.collect()
        _take_down(foreign, self._files)


def engine_precision(config: VllmGeneratorConfig, spec: GeneratorSpec, platform: Platform) -> str:
    """``fp32`` | ``bf16``. Raises CapabilityError if the device does not support it."""
    dtype = config.dtype if config.dtype != "auto" else spec.dtype
    return choose_precision(dtype, torch.device(platform.device)).name


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
