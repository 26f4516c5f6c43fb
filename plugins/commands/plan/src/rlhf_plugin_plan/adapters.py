"""What low-rank adapters add to a layer."""

from __future__ import annotations

from rlhf.interfaces.memory import Sharding

from rlhf_plugin_plan.heap import LARGE
from rlhf_plugin_plan.shape import ModelShape


def adapters_of(shape: ModelShape, sharding: Sharding) -> tuple[int, ...]:
    """The rank of each adapter of one layer; all layers are taken to have as many."""
    if not sharding.adapter_rank:
        return ()
    targets = sharding.adapter_targets
    count = sum(count for name, *_, count in shape.linear if targets is None or name in targets)
    return (sharding.adapter_rank,) * -(-count // len(shape.layers))


def adapter_holes(shape: ModelShape, tokens: int, sharding: Sharding, each: int) -> int:
    """Of one layer that is not fused, on a CPU: N x each x the outputs of its linear layers with adapters.

    peft makes the adapter's product, scales it and adds it to a new sum. What goes of these leaves holes in the heap,
    which the adapter's inner output cuts, as it stays (:func:`rlhf_modeling.adapters.linear`): as much as one output
    was measured (docs/plan.md). Tensors of 32 MiB leave none.

    Args:
        each: bytes of an element.
    """
    targets = sharding.adapter_targets
    there = [(o, count) for name, _, o, count in shape.linear if targets is None or name in targets]
    small = sum(outputs for outputs, count in there if tokens * each * outputs // count < LARGE)
    return int(tokens * each * small / len(shape.layers))
