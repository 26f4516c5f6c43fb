"""Pairs of answers, and the loss of an algorithm on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rlhf.interfaces import Algorithm, Loss
from rlhf.ops.loss_value import evaluate, finish_sums
from rlhf.ops.reduce import weigh
from rlhf.types import Row
from rlhf.types.examples import Example
from rlhf.types.examples import Sequence as TokenSequence


def pair(chosen: int = 2, rejected: int = 3, index: int = 0, prompt: int = 1) -> Example:
    """A pair of answers with these numbers of tokens."""
    sequences = [
        TokenSequence([4] * (prompt + n), [False] * prompt + [True] * n, r) for r, n in enumerate((chosen, rejected))
    ]
    return Example(Row({}, "data", index), sequences)


def loss_of(
    algorithm: type[Algorithm], loss: Loss, values: Sequence[float], examples: Sequence[Example], name: str = "logprobs"
) -> tuple[float, list[float], dict[str, Any]]:
    """(loss, gradient per value, metrics). ``values``: of the output ``name``, of chosen and rejected answers after one
    another."""
    batch = weigh(algorithm(parts={"loss": loss}).assemble(examples)[0], loss.reduce())
    leaf = torch.tensor(values, requires_grad=True)
    total, sums = evaluate(loss, batch, {name: leaf}, {}, {})
    total.backward()
    return float(total), leaf.grad.tolist(), finish_sums(sums)
