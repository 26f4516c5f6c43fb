"""Differences between the versions of vLLM that this plugin supports. No other file of the plugin checks the
version."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import CapabilityError


def release() -> tuple[Any, ...]:
    """Release of the imported vLLM, such as ``(0, 32)``."""
    import vllm

    return vllm.__version_tuple__[:2]


@contextmanager
def meeting_at(file: Path) -> Iterator[None]:
    """Context in which the workers of a starting engine meet through ``file``. vLLM before 0.28 would use a port. It
    names the shared memory of workers on a CPU after the text that follows the last colon of the address; newer
    versions name it after the file."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    modules: tuple[Any, ...] = (multiproc_executor, uniproc_executor)
    name, address = "get_file_store_init_method", f"file://{file}"
    if not hasattr(uniproc_executor, name):
        name, address = "get_distributed_init_method", f"file://{file}#:{file.name}"
    originals = [getattr(module, name) for module in modules]
    for module in modules:
        setattr(module, name, lambda *_: address)
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            setattr(module, name, original)


@contextmanager
def keeping_process_groups() -> Iterator[None]:
    """Context in which closing an engine does not end the process groups, because other engines of the process share
    them. Since 0.33 the executor in this process ends the model's groups before the core ends all groups."""
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    places: list[tuple[Any, str]] = [(core, "cleanup_dist_env_and_memory"), (parallel_state, "destroy_model_parallel")]
    originals = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def rename(mapper: Any, name: str) -> str | None:
    """The name that vLLM's ``WeightsMapper`` gives to a tensor; None if the model drops it. The method is public since
    0.31."""
    renamed: str | None = (getattr(mapper, "map_name", None) or mapper._map_name)(name)
    return renamed


def keep_seeds_on_a_cpu() -> None:
    """Make a CPU's sampler use seeds. Before 0.30 it samples all requests of a batch without seeds if one of them, such
    as a canary, has none. Before 0.29 it also compiles the sampling code, on a platform that compiles nothing else."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    sampler: Any = TopKTopPSampler
    if release() < (0, 30):
        sampler.forward_cpu = sampler.forward_native


def require(distribution: str, option: str, behaviour: str) -> None:
    """Raises CapabilityError if a distribution, such as ``vllm 0.31.2``, is older than 0.32, which ``option`` needs.
    ``behaviour`` describes what the older version does."""
    number = distribution.split()[-1]
    if tuple(int(part) for part in number.split(".")[:2]) < (0, 32):
        raise CapabilityError(
            f"{option} needs vLLM 0.32 or later; {distribution} {behaviour}. Install a later one, or remove {option}."
        )


def start_beside_numba() -> None:
    """Make workers on a CPU start beside numba. At their start, vLLM 0.32 reads ``__dict__`` of everything that an
    imported module names. numba's library would return a function, and the start would fail."""
    ffi: Any = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None:
        ffi.lib._fntab.setdefault("__dict__", {})


def keep_pixels_of_cached_images() -> None:
    """Make workers get the pixels of each image of a request. vLLM 0.32 leaves out those of images whose keys and
    values are cached when the request starts. If a load of weights or a full cache drops these, the request is computed
    again, and the engine would end without the pixels."""
    from vllm.v1.core.sched import output

    scheduler: Any = output
    if hasattr(scheduler, "strip_covered_mm_data"):
        scheduler.strip_covered_mm_data = lambda features, *_, **__: features


def mend_drafts_on_a_cpu() -> None:
    """Mend speculative decoding in a worker on a CPU. There vLLM 0.32 leaves ``temperature``, ``top_k`` and ``top_p``
    of proposed tokens uninitialised (https://github.com/vllm-project/vllm/issues/55005). Its ``top_k`` also ends the
    engine in a step without proposals."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    sampler: Any = rejection_sampler
    sampler.expand_batch_to_tokens = _expand
    sampler.apply_top_k_top_p = lambda logits, k, p: apply_top_k_top_p(logits, k, p) if len(logits) else logits


def _expand(x_B: Any, ends_B: Any, tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """Repeat the value of each request for each of its proposed tokens, ``[tokens]``. ``ends_B`` is the cumulative
    number of these tokens."""
    counts_B = ends_B.diff(prepend=ends_B.new_zeros(1))
    return x_B.masked_fill(x_B == replace_from, replace_to).repeat_interleave(counts_B)
