"""What differs between the versions of vLLM that this plugin takes. No other file of it asks for a version."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import CapabilityError


def release() -> tuple[Any, ...]:
    """Of the imported vLLM, such as ``(0, 32)``."""
    import vllm

    return vllm.__version_tuple__[:2]


@contextmanager
def meeting_at(file: Path) -> Iterator[None]:
    """Inside, the workers of an engine that starts meet through ``file``. vLLM before 0.28 would use a port, and names
    the memory that workers on a CPU share after what follows the last colon of the address; since then, after the
    file."""
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
    """Inside, an engine that is closed leaves the process groups alone, which other engines of the process share. Since
    0.33 the executor in this process ends the model's groups before the core ends all."""
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
    """What vLLM's ``WeightsMapper`` makes of a tensor's name; None: the model drops it. The method is public since
    0.31."""
    renamed: str | None = (getattr(mapper, "map_name", None) or mapper._map_name)(name)
    return renamed


def keep_seeds_on_a_cpu() -> None:
    """Before 0.30 a CPU's sampler draws without seeds for all requests of a batch if one of them, such as a canary, has
    none. Before 0.29 it also compiles what draws, on a platform that compiles nothing."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    sampler: Any = TopKTopPSampler
    if release() < (0, 30):
        sampler.forward_cpu = sampler.forward_native


def require(distribution: str, option: str, behaviour: str) -> None:
    """Raises CapabilityError where a distribution, such as ``vllm 0.31.2``, is before 0.32, which ``option`` needs.
    ``behaviour`` says what the older one does."""
    number = distribution.split()[-1]
    if tuple(int(part) for part in number.split(".")[:2]) < (0, 32):
        raise CapabilityError(
            f"{option} needs vLLM 0.32 or later; {distribution} {behaviour}. Install a later one, or remove {option}."
        )


def start_beside_numba() -> None:
    """vLLM 0.32 asks everything that an imported module names for its ``__dict__`` when a worker on a CPU starts.
    numba's library would answer with a function, and the start would fail."""
    ffi: Any = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None:
        ffi.lib._fntab.setdefault("__dict__", {})


def mend_drafts_on_a_cpu() -> None:
    """In a worker on a CPU. There vLLM 0.32 leaves ``temperature``, ``top_k`` and ``top_p`` of proposed tokens as the
    memory happens to be (https://github.com/vllm-project/vllm/issues/55005), and its ``top_k`` ends the engine in a
    step in which nothing is proposed."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    sampler: Any = rejection_sampler
    sampler.expand_batch_to_tokens = _expand
    sampler.apply_top_k_top_p = lambda logits, k, p: apply_top_k_top_p(logits, k, p) if len(logits) else logits


def _expand(x_B: Any, ends_B: Any, tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """The value of each request for each of its proposed tokens, ``[tokens]``. ``ends_B`` counts these tokens up to and
    including those of a request."""
    counts_B = ends_B.diff(prepend=ends_B.new_zeros(1))
    return x_B.masked_fill(x_B == replace_from, replace_to).repeat_interleave(counts_B)
