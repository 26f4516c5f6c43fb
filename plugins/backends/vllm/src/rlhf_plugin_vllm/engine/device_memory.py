"""The memory of an engine's GPUs at its start: the fraction that vLLM may use, and whether the model fits at all.

Roles are loaded before the engine, and other processes may use its GPUs. vLLM refuses to start if less memory is free
than its fraction, even if the size of the cache is also set.
"""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
from pathlib import Path

import torch
from rlhf.errors import CapabilityError, ModelError
from rlhf.interfaces import GeneratorSpec
from rlhf_hub.processors import reads_images
from rlhf_hub.published import INDEX
from safetensors import safe_open

from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.memory import MEMORY_SHARE

_MEASURE = """
import json, sys, torch
print(json.dumps([torch.cuda.mem_get_info(device) for device in range(int(sys.argv[1]))]))
"""
_MEASURE_SECONDS = 120.0


def memory_fraction(config: VllmGeneratorConfig, spec: GeneratorSpec, folder: Path, dtype: str) -> float:
    """vLLM's ``gpu_memory_utilization`` for an engine that starts now.

    Args:
        folder: folder of the model.
        dtype: ``fp32`` | ``bf16``, dtype of the engine's weights.

    Raises CapabilityError, with the numbers, if too little memory is free.
    """
    workers = config.tensor_parallel * config.pipeline_parallel
    free, total = free_and_total(workers)
    if config.kv_cache_gib is not None:
        budget, fraction = free, free / total / 2  # vLLM only compares it with the free memory
    elif config.memory_share is None and spec.shares_devices:
        budget, fraction = int(MEMORY_SHARE * free), MEMORY_SHARE * free / total
    else:
        fraction = config.memory_share or MEMORY_SHARE
        budget = math.ceil(fraction * total)
        if budget > free:
            raise CapabilityError(
                f"the generator 'vllm' would take {fraction:g} of a GPU's {_gib(total)} (generator.memory_share), "
                f"or {_gib(budget)}, but {_gib(free)} are free when it starts: other processes and the run's roles "
                f"hold {_gib(total - free)}. Set generator.memory_share = {math.floor(90 * free / total) / 100:g} or "
                "less, or generator.kv_cache_gib; or end the other processes (nvidia-smi lists them)."
            )
    if reads_images(spec.path) and not spec.max_images:  # vLLM loads only the text part, whose size is unknown here
        return fraction
    element = {"fp32": 4, "bf16": 2}[dtype] if config.quantization is None else 1  # at least: the embedding has 2
    weights = math.ceil(_elements(folder) * element / workers)
    cache = int((config.kv_cache_gib or 0) * 2**30)
    if weights + cache > budget:
        parts = f"{_gib(weights)} for weights"
        if cache:
            parts += f" and {_gib(cache)} for the cache (generator.kv_cache_gib)"
        raise CapabilityError(
            f"the generator 'vllm' does not fit: each of its GPUs ({workers}) needs {parts}, but the engine may take "
            f"{_gib(budget)}: {_gib(free)} of {_gib(total)} are free at its start, the run's roles and other processes "
            f"hold {_gib(total - free)}. Divide the engine over more GPUs (generator.tensor_parallel), give it GPUs of "
            "its own ([placement.generator]), set a smaller cache, or end the other processes (nvidia-smi lists them)."
        )
    return fraction


def free_and_total(devices: int) -> tuple[int, int]:
    """Free bytes and total bytes, on the fullest of this process's first ``devices`` GPUs."""
    if devices == 1:
        gc.collect()
        torch.cuda.empty_cache()  # from a trainer in this process
        return torch.cuda.mem_get_info(0)
    # A worker process computes on each device. Asking here would leave half a GiB of CUDA context on each.
    command = [sys.executable, "-c", _MEASURE, str(devices)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MEASURE_SECONDS, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise ModelError(
            f"the free memory of {devices} GPUs could not be measured: {lines[-1] if lines else error}"
        ) from error
    free, total = min(json.loads(done.stdout.splitlines()[-1]))
    return free, total


def _elements(folder: Path) -> int:
    """Number of elements in the model's weight files."""
    index = folder / INDEX
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    count = 0
    for name in sorted(names):
        if not (folder / name).is_file():  # vLLM reports the missing file
            continue
        with safe_open(folder / name, "pt") as file:
            count += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118 - no dict
    return count


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
