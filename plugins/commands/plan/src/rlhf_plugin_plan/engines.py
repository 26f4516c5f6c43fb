"""The generator's engines: what one of their devices holds, in bytes, and what drawing samples adds.

Quantities first, as in :mod:`rlhf_plugin_plan.formulas`; then what is there at which time.
"""

from __future__ import annotations

from rlhf.interfaces.memory import Footprint

from rlhf_plugin_plan import heap
from rlhf_plugin_plan.busy import Parts, sum_of
from rlhf_plugin_plan.formulas import FP32, layer_working
from rlhf_plugin_plan.layout import EngineLayout, Machine
from rlhf_plugin_plan.shape import ModelShape


def engine_weights(shape: ModelShape, footprint: Footprint) -> int:
    """(P, and a tied head that is held apart) x bytes per weight / (tensor x pipeline parallel)."""
    return int(
        held_by_engine(shape, footprint)
        * footprint.weight_bytes
        / (footprint.tensor_parallel * footprint.pipeline_parallel)
    )


def held_by_engine(shape: ModelShape, footprint: Footprint) -> int:
    """Parameters of an engine's copies, all of its devices together."""
    return shape.parameters + (shape.head if footprint.own_head and shape.tied else 0)


def cache_per_token(shape: ModelShape, footprint: Footprint) -> float:
    """Bytes per token and device: elements of keys and values over all layers x bytes / parallel parts; heads are not
    split further than there are."""
    parts = min(footprint.tensor_parallel, shape.cache_heads) * footprint.pipeline_parallel
    return shape.cache_elements * footprint.kv_bytes / parts


def cache_grown(shape: ModelShape, footprint: Footprint, samples: int, longest: int) -> int:
    """Of a cache that grows with need, at its largest: rows x longest sequence."""
    tokens = min(footprint.rows, samples) * longest
    if footprint.cache_tokens is not None:
        tokens = min(tokens, footprint.cache_tokens)
    return int(tokens * cache_per_token(shape, footprint))


def prompt_pass(shape: ModelShape, footprint: Footprint, prompts: int, longest: int, *, bf16: bool, device: str) -> int:
    """The prompts' forward pass: one layer's temporaries, and the keys and values that it makes, where no cache is
    reserved for them.

    Args:
        prompts: tokens of all prompts that are computed.
    """
    layer = max(shape.layers, key=lambda x: x.parameters)
    tokens = min(footprint.prefill_tokens, prompts)
    working = layer_working(layer, shape.hidden, tokens, longest, bf16=bf16, device=device)
    made = tokens * shape.cache_elements * footprint.kv_bytes if footprint.kv_space is None else 0
    return working.all + int(made)


def decoding_step(shape: ModelShape, footprint: Footprint, samples: int, longest: int) -> int:
    """Beside the cache: four fp32 matrices of rows x vocabulary, or, where the cache grows, the old keys (or values) of
    one layer beside the new ones."""
    copied = cache_grown(shape, footprint, samples, longest) // (2 * len(shape.layers))
    return max(4 * min(footprint.rows, samples) * shape.vocabulary * FP32, copied)


def engine_resting(engines: EngineLayout, machine: Machine, *, asleep: bool, cache: bool = True) -> Parts:
    """One device's part of an engine between calls."""
    footprint = engines.footprint
    if asleep:
        return {}
    here = {"weights": engine_weights(engines.shape, footprint), "working": footprint.working}
    if cache:
        here["cache"] = reserved_cache(engines, machine) or 0
    return {part: size for part, size in here.items() if size}


def reserved_cache(engines: EngineLayout, machine: Machine) -> int | None:
    """Bytes of cache that a device of the engine reserves; None where it grows with need, or nobody knows the memory
    that it takes a share of."""
    footprint = engines.footprint
    if footprint.kv_space is not None:
        return footprint.kv_space
    if footprint.share is None:
        return None
    if machine.memory is None:
        return int(engines.longest * cache_per_token(engines.shape, footprint))
    weights = engine_weights(engines.shape, footprint)
    return max(0, int(footprint.share * machine.memory) - weights - footprint.working)


def sampling(engines: EngineLayout, machine: Machine) -> Parts:
    """What drawing samples adds: a cache that grows, and the largest forward pass where the engine does not hold memory
    for it already.

    A cache that grows is largest at the end, when the prompts' pass is over, unless further samples wait for a row:
    then both are there. On a CPU the process keeps what the smaller of the two freed.
    """
    shape, footprint = engines.shape, engines.footprint
    if footprint.share is not None:
        return {}
    prompts = prompt_pass(
        shape, footprint, engines.prompt_tokens, engines.longest, bf16=engines.bf16, device=machine.device
    )
    step = decoding_step(shape, footprint, engines.samples, engines.longest)
    added: Parts = {}
    apart = footprint.kv_space is None and engines.samples <= footprint.rows
    if footprint.kv_space is None:
        added["cache"] = cache_grown(shape, footprint, engines.samples, engines.longest)
    if apart and prompts > sum_of(added) + step:
        added["cache"], added["working"] = 0, prompts
    else:
        added["working"] = step if apart else max(prompts, step)
    moments = [heap.Size(sum_of(added))]
    if machine.device == "cpu":
        return added | {"allocator": prompts + step - added["working"]}
    return added | {"allocator": heap.allocator(moments, heap.Size(), machine.device)}


def left_by_sampling(engines: EngineLayout, machine: Machine) -> int:
    """Bytes of a CPU's heap after :func:`sampling`: all of it but a cache whose tensors, keys or values of one layer,
    are blocks of their own."""
    added = sampling(engines, machine)
    each = added.get("cache", 0) / (2 * len(engines.shape.layers))
    return sum_of(added) - (added.get("cache", 0) if each >= heap.LARGE else 0)
