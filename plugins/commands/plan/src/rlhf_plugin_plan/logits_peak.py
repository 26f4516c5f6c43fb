"""The memory of a head at its peak: one pure function per quantity, in bytes; the symbols are those of
:mod:`rlhf_plugin_plan.formulas`."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf.interfaces.memory import Sharding

from rlhf_plugin_plan.formulas import FP32
from rlhf_plugin_plan.heap import Size, tensors, total
from rlhf_plugin_plan.shape import ModelShape


def logits(shape: ModelShape, tokens: int, sharding: Sharding) -> int:
    """One fp32 matrix of logits: min(N W, logits_chunk) x 4."""
    chunk = max(1, sharding.logits // shape.outputs)
    return min(tokens, chunk) * shape.outputs * FP32


def copies(outputs: Iterable[str], *, backward: bool) -> int:
    """How many such matrices exist at once. Counted: log-probs 2 forward, 4 with backward; entropy 4 and 5; both 4 and
    6. An output of a plugin's own: 2 more each, an allowance. Hidden states: none."""
    names = set(outputs) - {"hidden"}
    if not names:
        return 0
    own = len(names - {"logprobs", "entropy", "values", "scores"})
    if backward:
        known = 6 if {"logprobs", "entropy"} <= names else 5 if "entropy" in names else 4
    else:
        known = 4 if "entropy" in names else 2
    return known + 2 * own


def head_forward(shape: ModelShape, tokens: int, sharding: Sharding, outputs: Iterable[str]) -> Size:
    """Copies of the logits, and the selected hidden states twice."""
    return _head(shape, tokens, sharding, copies(outputs, backward=False))


def head_backward(shape: ModelShape, tokens: int, sharding: Sharding, outputs: Iterable[str]) -> Size:
    """The same with the backward pass, and, where there are several chunks, the head's gradient that they add up."""
    several = tokens > max(1, sharding.logits // shape.outputs)
    gradient = [head_gradient(shape)] if several else []
    return total([_head(shape, tokens, sharding, copies(outputs, backward=True)), *gradient])


def head_gradient(shape: ModelShape) -> Size:
    """Fp32."""
    return tensors(shape.head * FP32, shape.head * FP32)


def _head(shape: ModelShape, tokens: int, sharding: Sharding, count: int) -> Size:
    one, hidden = logits(shape, tokens, sharding), tokens * shape.hidden * FP32
    return total([tensors(count * one, one), tensors(2 * hidden, hidden)])
